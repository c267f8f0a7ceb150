"""Other processes: who lives, how they are told apart from a later one with the same number, how they end."""

import ctypes
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: a pid is used again, a pid with its start time is not (TensorBoard issue 2483)."""

    pid: int
    started: int  # clock ticks since boot

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has `pid` now, or None."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def current(cls) -> "ProcessId":
        found = cls.of(os.getpid())
        assert found is not None, "a running process has a start time"
        return found

    def alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def kill(self) -> None:
        """SIGKILL, if it is still this process."""
        if self.alive():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits for its end, as a process that need not be a child; tells whether it came."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)


def _start_time(pid: int) -> int | None:
    # Field 22 of /proc/PID/stat, counted after the command name, which may hold spaces and parentheses.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel end this process when its parent ends: no orphan trains on alone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
