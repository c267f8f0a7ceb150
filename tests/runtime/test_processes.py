"""Who lives, and who only has the same number."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_sdk.runtime.processes import ProcessId, adopt_orphans, die_with_parent
from tests.process.kit import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_by_its_number_and_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessId.of(sleeper.pid)
    assert found is not None
    assert found.alive()
    assert ProcessId.current() == ProcessId.of(os.getpid())


def test_another_process_of_the_same_number_is_not_it(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessId.of(sleeper.pid)
    assert found is not None
    earlier = ProcessId(found.pid, found.started - 1)
    assert not earlier.alive()
    assert earlier.wait_gone(0.0)
    earlier.kill()
    assert found.alive()


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessId.of(sleeper.pid)
    assert found is not None
    assert not found.wait_gone(0.05)
    found.kill()
    assert found.wait_gone(5.0)
    assert not found.alive()
    assert ProcessId.of(sleeper.pid) is None
    found.kill()  # and again, to nobody


def test_nobody_has_this_number() -> None:
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert ProcessId.of(pid_max + 1) is None
    assert ProcessId(pid_max + 1, 1).wait_gone(0.0)


def test_a_name_with_parentheses_does_not_hide_the_start(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(odd), "60"])
    found = ProcessId.of(process.pid)
    process.kill()
    process.wait()
    own = ProcessId.current()
    assert found is not None
    assert found.started >= own.started


def _parent(after: str) -> tuple[int, subprocess.Popen[str]]:
    """A process whose child does `after` and then sleeps; returns the child's number and the parent."""
    code = f"""
import os, sys, time
from resilient_sdk.runtime.processes import die_with_parent
parent = os.getpid()
child = os.fork()
if child == 0:
    {after}
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    return int(process.stdout.readline()), process


def test_who_dies_with_its_parent_is_gone_with_it() -> None:
    child, parent = _parent("die_with_parent(parent)")
    found = ProcessId.of(child)
    assert found is not None
    parent.kill()
    parent.communicate()
    assert found.wait_gone(5.0)


def test_who_asks_too_late_dies_at_once() -> None:
    """The parent had died between the fork and the request."""
    child = os.fork()
    if child == 0:
        die_with_parent(os.getpid())  # surely not its parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_an_orphan_is_adopted_by_whoever_asked_for_it() -> None:
    child = os.fork()
    if child == 0:
        adopt_orphans()
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            orphan = os.fork()
            if orphan == 0:
                time.sleep(0.2)
                os._exit(7)
            os.write(writing, str(orphan).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        status = os.waitpid(int(os.read(reading, 16)), 0)[1]
        os._exit(os.waitstatus_to_exitcode(status))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    wait_for(lambda: ProcessId.of(child) is None, "its end")
