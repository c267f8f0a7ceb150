"""Processes in a session of their own: nothing the starter's kernel or terminal does reaches them."""

import os
import subprocess
import sys

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import child_environment
from resilient_sdk.errors import RunUnreachable
from resilient_sdk.runtime.rundir import RunDirectory

START_S = 30.0


def start_detached(directory: RunDirectory, name: str) -> None:
    """Starts the run's `controller` or `agent`; returns when it has written itself down.

    Two may be started at once, by an owner and by the other process: the run's locks let one of them live.

    Raises:
        RunUnreachable: it ended at once, or is not there after 30 s.
    """
    log_path = directory.logs / f"{name}.log"
    with open(log_path, "ab") as log:
        starter = subprocess.run(
            [sys.executable, "-m", f"resilient_sdk.runtime.{name}", str(directory.path)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=child_environment(), check=False,
        )  # fmt: skip
    deadline = SYSTEM_CLOCK.monotonic() + START_S
    while directory.process(name) is None:
        if starter.returncode != 0 or SYSTEM_CLOCK.monotonic() > deadline:
            raise RunUnreachable(f"the run's {name} did not start", fix=f"Read {log_path}.")
        SYSTEM_CLOCK.sleep(0.01)


def detach() -> bool:
    """Forks; True in the process that goes on, as nobody's child. The starter's wait ends with the other one.

    Without this a notebook would have to reap its runs' processes, and each would stay a zombie until it did.
    """
    if os.fork() == 0:
        return True
    os._exit(0)
