"""Processes in sessions of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_sdk.config import RunSettings
from resilient_sdk.errors import RunUnreachable
from resilient_sdk.runtime import rundir
from resilient_sdk.runtime.detached import start_detached
from resilient_sdk.runtime.rundir import RunDirectory

CODE = """
import sys, time
from pathlib import Path
from resilient_sdk.runtime.detached import detach
from resilient_sdk.runtime.rundir import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
if detach(directory, "agent"):
    if sys.argv[2] == "fails":
        sys.exit("no")
    directory.note_process("agent")
    time.sleep(60)
"""


@pytest.fixture
def directory(home: Path) -> RunDirectory:
    assert home
    return rundir.create(RunSettings(run="run-1", nproc=1, store="/nowhere", memory="/nowhere", cwd="/"), b"")


def start(directory: RunDirectory, how: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", CODE, str(directory.path), how],
        cwd=Path(__file__).parents[2], check=False, start_new_session=True,
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ).returncode  # fmt: skip


def test_the_starter_returns_when_it_is_there_and_is_not_its_parent(directory: RunDirectory) -> None:
    assert start(directory, "lives") == 0
    found = directory.process("agent")
    assert found is not None
    try:
        fields = Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()
        parent, session = int(fields[1]), int(fields[3])
        assert parent != os.getpid()
        assert session != os.getsid(0)
        # Nothing that the starter's terminal does reaches it.
        with pytest.raises(ProcessLookupError):
            os.killpg(found.pid, signal.SIGINT)
    finally:
        found.kill()
        assert found.wait_gone(5.0)


def test_one_that_ends_at_once_is_told(directory: RunDirectory) -> None:
    assert start(directory, "fails") == 1


def test_a_controller_that_cannot_start_is_one_line_with_its_log(directory: RunDirectory) -> None:
    (directory.path / "run.json").write_text("{}")
    with pytest.raises(
        RunUnreachable, match=r"the run's controller did not start\. Read .*controller\.log"
    ) as told:
        start_detached(directory, "controller")
    assert "\n" not in str(told.value)
    assert "ValidationError" in (directory.logs / "controller.log").read_text()
    assert not directory.alive()
