"""Processes in a session of their own: nothing the starter's kernel or terminal does reaches them."""

import os
import subprocess
import sys

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import child_environment
from resilient_sdk.errors import RunUnreachable
from resilient_sdk.runtime.rundir import RunDirectory, open_private

START_S = 30.0


def start_detached(directory: RunDirectory, name: str) -> None:
    """Starts the run's `controller` or `agent`; returns when one has written itself down.

    Two may be started at once, by an owner and by the other process: the run's locks let one of them live.

    Raises:
        RunUnreachable: it ended at once, or is not there after 30 s.
    """
    log_path = directory.logs / f"{name}.log"
    with open_private(log_path) as log:
        starter = subprocess.run(
            [sys.executable, "-m", f"resilient_sdk.runtime.{name}", str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=child_environment(),
            check=False,
        )
    if starter.returncode != 0:
        raise RunUnreachable(f"the run's {name} did not start", fix=f"Read {log_path}.")


def detach(directory: RunDirectory, name: str) -> bool:
    """Forks; True in the process that goes on, as nobody's child. The other one ends when that one has written
    itself down (or another of its kind lives), with the exit status 1 if it ended before.

    Without this a notebook would have to reap its runs' processes, and each would stay a zombie until it did.
    """
    child = os.fork()
    if child == 0:
        return True
    deadline = SYSTEM_CLOCK.monotonic() + START_S
    while directory.process(name) is None and SYSTEM_CLOCK.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0] != 0:
            os._exit(0 if directory.process(name) is not None else 1)
        SYSTEM_CLOCK.sleep(0.01)
    os._exit(0 if directory.process(name) is not None else 1)
