"""The nouns that cross rooms. An id is used once: a worker that comes back is another worker."""

import re
import secrets
from typing import NewType

RunId = NewType("RunId", str)
"""One training job. Safe as a file name and as an argument."""
WorkerId = NewType("WorkerId", int)
"""One life of one process, counted from 0 in a run and never reused (its *incarnation*)."""
Rank = NewType("Rank", int)
"""A place in the job, 0 … world size - 1."""
Generation = NewType("Generation", int)
"""One membership of the job, counted from 1. What carries an older one is refused."""
Step = NewType("Step", int)
"""Optimizer steps finished: 0 is the state before the first."""

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def new_run_id() -> RunId:
    """Returns an id that no stranger can guess and that is short enough to type."""
    return RunId("run-" + secrets.token_hex(4))


def is_run_id(text: str) -> bool:
    """Tells whether `text` may name a run: nothing that could climb out of the runs' directory."""
    return _RUN_ID.fullmatch(text) is not None
