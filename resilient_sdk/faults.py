"""Faults as values: a plan says who dies, where and how; a marker file makes each fault strike once a run.

The product's own chaos drills and its tests use the same plan (after torchft's event injector). Without a
plan a fault point is one comparison.
"""

import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

POINTS = (
    "start",  # a worker, before the user's code
    "build",  # inside job.initialize, before the engine is built
    "begin",  # a step begins, its batch is about to be drawn
    "capture",  # a snapshot is half copied
    "captured",  # a snapshot is complete, nobody was told yet
    "upload",  # some chunks are stored, no manifest
    "manifest",  # the manifest is stored, nobody was told yet
    "promote",  # a standby was told its rank and has not joined yet
    "restore",  # a rank has read its state and has not loaded it yet
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at `point`, for `rank` (None: any, also a standby), from `step` on, `times` times a run."""

    point: str
    rank: int | None = None
    step: int = 0
    times: int = 1
    action: str = (
        "kill"  # kill | stop (SIGSTOP) | hang (the thread waits for ever) | exit (sys.exit(0)) | raise
    )

    def record(self) -> dict[str, object]:
        return asdict(self)


class InjectedFault(Exception):
    """Raised by a fault whose action is `raise`: stands for a bug in the user's code."""


class FaultPlan:
    """The faults of a run. `marks` is a directory in which struck faults are remembered."""

    def __init__(self, faults: tuple[Fault, ...] = (), marks: Path | None = None) -> None:
        self._faults = faults
        self._marks = marks

    def point(self, name: str, *, rank: int | None, step: int = 0) -> None:
        """Strikes if a fault of the plan is due here; returns otherwise."""
        for number, fault in enumerate(self._faults):
            due = fault.point == name and step >= fault.step and fault.rank in (None, rank)
            if due and self._claim(number, fault.times):
                _strike(fault)

    def _claim(self, number: int, times: int) -> bool:
        # O_EXCL decides between two ranks that reach the point together, and outlives the process that dies.
        if self._marks is None:
            return True
        for strike in range(times):
            try:
                os.close(
                    os.open(
                        self._marks / f"fault-{number}-{strike}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
                    )
                )
            except FileExistsError:
                continue
            return True
        return False


def _strike(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "hang":
        threading.Event().wait()
    elif fault.action == "exit":
        raise SystemExit(0)
    else:
        raise InjectedFault(f"injected at {fault.point}")


NO_FAULTS = FaultPlan()
