"""What the coordinator orders: imperatives, each idempotent, so that they may be sent again.

Those with a `worker` go to that worker's agent, and all but StartWorker and KillWorker on to the worker.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from resilient_sdk.errors import CoordinationError
from resilient_sdk.events import Fact


@dataclass(frozen=True, slots=True)
class Command:
    """Base of all commands."""

    def record(self) -> dict[str, Any]:
        return {"command": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, slots=True)
class StartWorker(Command):
    """Fork a worker from the zygote. What it is for, it is told once it runs."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillWorker(Command):
    """SIGKILL: nothing less ends a process that hangs."""

    worker: int


@dataclass(frozen=True, slots=True)
class StandBy(Command):
    """Warm up without a rank."""

    worker: int


@dataclass(frozen=True, slots=True)
class Leave(Command):
    """The generation is broken: get out of its collectives."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Join(Command):
    """Own `rank` in `generation`; implies Leave of every older one.

    `restores`: the group will stand at a snapshot or not at all, so that the weights it builds with are nobody's.
    """

    worker: int
    generation: int
    rank: int
    world_size: int
    restores: bool


@dataclass(frozen=True, slots=True)
class RestoreFrom(Command):
    """Stand at `step`. `scratch`: no snapshot is common; stand where the user's code starts (step 0)."""

    worker: int
    generation: int
    step: int
    scratch: bool


@dataclass(frozen=True, slots=True)
class Go(Command):
    """Every member stands at the same step: train."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreSnapshot(Command):
    """Upload the snapshot of `step`. All members are told the same step, or none would ever be complete."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class NoteHead(Command):
    """The head names `step`: what is older may be collected."""

    worker: int
    step: int


@dataclass(frozen=True, slots=True)
class Finish(Command):
    """Every member has done its last step: leave the loop."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Release(Command):
    """A standby that is not needed any more: exit with 0."""

    worker: int


@dataclass(frozen=True, slots=True)
class Unwind(Command):
    """The run ends: leave the user's code and exit."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class MoveHead(Command):
    """Every rank's manifest of `step` is stored: commit it. `keys[rank]` is the manifest's."""

    generation: int
    step: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndRun(Command):
    """All is said: kill what is left after `grace_s`, commit what memory holds, clean up, exit."""

    outcome: str
    message: str
    error: dict[str, Any]
    grace_s: float


@dataclass(frozen=True, slots=True)
class Announce(Command):
    """Tell those who watch."""

    fact: Fact


WORKER_COMMANDS = (
    StartWorker, KillWorker, StandBy, Leave, Join, RestoreFrom,
    Go, StoreSnapshot, NoteHead, Finish, Release, Unwind,
)  # fmt: skip
_KINDS = {kind.__name__: kind for kind in WORKER_COMMANDS}


def command_from(record: Mapping[str, Any]) -> Command:
    """The command that `record()` wrote, for those that travel.

    Raises:
        CoordinationError: the record names no such command, or its fields do not fit.
    """
    kind = _KINDS.get(str(record.get("command")))
    if kind is None:
        raise CoordinationError(f"unknown command {record.get('command')!r}")
    known = {f.name for f in fields(kind)}
    try:
        return kind(**{name: value for name, value in record.items() if name in known})
    except TypeError as problem:
        raise CoordinationError(f"incomplete command {kind.__name__}: {problem}") from problem
