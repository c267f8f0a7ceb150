"""DeepSpeed training that survives crashed ranks, hangs and lost processes, bit for bit.

import resilient_sdk as rs

run = rs.launch(train, nproc=4, standbys=1)     # returns at once; the run lives on its own
run = rs.attach("run-1a2b3c4d")                 # from anywhere, at any time
job = rs.job()                                  # in a script under `resilient run train.py`
"""

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_sdk.errors import ResilientError
    from resilient_sdk.runtime.run import Run, Status, attach, launch, resume, runs
    from resilient_sdk.training.job import Job, job

_HOMES = {
    "Job": "resilient_sdk.training.job",
    "ResilientError": "resilient_sdk.errors",
    "Run": "resilient_sdk.runtime.run",
    "Status": "resilient_sdk.runtime.run",
    "attach": "resilient_sdk.runtime.run",
    "job": "resilient_sdk.training.job",
    "launch": "resilient_sdk.runtime.run",
    "resume": "resilient_sdk.runtime.run",
    "runs": "resilient_sdk.runtime.run",
}
__all__ = ["Job", "ResilientError", "Run", "Status", "attach", "job", "launch", "resume", "runs"]


def __getattr__(name: str) -> Any:
    # On demand: the controller and the command must start without torch, which takes seconds to import.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
