"""What happened: frozen facts in the past tense. One vocabulary feeds the coordinator, the journal and the panel.

A fact travels as a flat JSON object whose `fact` names its class.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from resilient_sdk.errors import CoordinationError


@dataclass(frozen=True, slots=True)
class Fact:
    """Base of all facts. `durable` ones are journaled, the others come many times a second."""

    durable: ClassVar[bool] = False

    def record(self) -> dict[str, Any]:
        """The fact as a JSON object."""
        return {"fact": type(self).__name__, **asdict(self)}


# ---- the run ----


@dataclass(frozen=True, slots=True)
class RunStarted(Fact):
    durable: ClassVar[bool] = True
    nproc: int
    standbys: int
    max_restarts: int
    stall_floor_s: float
    startup_s: float


@dataclass(frozen=True, slots=True)
class RunResumed(Fact):
    """A run that had ended goes on: every earlier worker is gone."""

    durable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class StopRequested(Fact):
    durable: ClassVar[bool] = True
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded(Fact):
    """`outcome`: finished | stopped | failed | no_standby. `error` is there if failed."""

    durable: ClassVar[bool] = True
    outcome: str
    message: str
    error: dict[str, Any] = field(default_factory=dict)


# ---- workers, as their agent sees them ----


@dataclass(frozen=True, slots=True)
class AgentJoined(Fact):
    """An agent (re)connected; `workers` are those alive on its node, the only ones that still exist."""

    durable: ClassVar[bool] = True
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerStarted(Fact):
    durable: ClassVar[bool] = True
    worker: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerExited(Fact):
    """`code` is the exit status, or None if a signal ended it; `at` is monotonic seconds of its node."""

    durable: ClassVar[bool] = True
    worker: int
    code: int | None
    signal: int | None
    at: float


@dataclass(frozen=True, slots=True)
class StartFailed(Fact):
    """The agent cannot start workers at all, however often it tries."""

    durable: ClassVar[bool] = True
    reason: str


# ---- workers, as they see themselves ----


@dataclass(frozen=True, slots=True)
class StandbyReady(Fact):
    """A standby waits. `warm`: model, engine and one rehearsal step are done; else `note` says why not."""

    durable: ClassVar[bool] = True
    worker: int
    warm: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class StepsOffered(Fact):
    """The steps that a member can restore for its rank, newest first; none means: only from the start."""

    worker: int
    generation: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored(Fact):
    """A member stands at `step`. `phases` are seconds by name; `source` is memory | store | start."""

    worker: int
    generation: int
    step: int
    source: str
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestoreFailed(Fact):
    """What was offered could not be read after all (corrupt in every copy): an older step is taken."""

    durable: ClassVar[bool] = True
    worker: int
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Beat(Fact):
    """Sent by a worker's own thread: it lives. `waiting` tells whether its main thread is in a collective."""

    worker: int
    generation: int
    step: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class DeadlinePaused(Fact):
    """A member does something long on purpose (`paused`), or is back from it."""

    worker: int
    generation: int
    paused: bool


@dataclass(frozen=True, slots=True)
class StepBegun(Fact):
    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class StepFinished(Fact):
    """Optimizer step `step` is done and its snapshot is in memory. `metrics` is what the user reported."""

    worker: int
    generation: int
    step: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFailed(Fact):
    """An exception left the user's step. `collective`: it came out of a collective, so a peer may be the cause."""

    worker: int
    generation: int
    step: int
    collective: bool
    kind: str
    message: str
    traceback: str
    at: float


@dataclass(frozen=True, slots=True)
class TrainFailed(Fact):
    """An exception left the user's code outside a step."""

    worker: int
    generation: int
    kind: str
    message: str
    traceback: str
    at: float


@dataclass(frozen=True, slots=True)
class StepsDone(Fact):
    """A member has nothing left to step through."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class TrainReturned(Fact):
    durable: ClassVar[bool] = True
    worker: int


# ---- the store ----


@dataclass(frozen=True, slots=True)
class ManifestStored(Fact):
    """A rank's state of `step` is in the store; `key` is its manifest's."""

    worker: int
    generation: int
    rank: int
    step: int
    key: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class UploadMissed(Fact):
    """A rank's upload of `step` was skipped, or (`failed`) the store refused it; training went on."""

    worker: int
    generation: int
    step: int
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class HeadMoved(Fact):
    """The head names `step`: it is committed."""

    durable: ClassVar[bool] = True
    generation: int
    step: int


# ---- what the coordinator decided, for those who watch ----


@dataclass(frozen=True, slots=True)
class RankLost(Fact):
    durable: ClassVar[bool] = True
    generation: int
    rank: int
    worker: int
    cause: str


@dataclass(frozen=True, slots=True)
class GenerationBroken(Fact):
    durable: ClassVar[bool] = True
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class StandbyPromoted(Fact):
    durable: ClassVar[bool] = True
    generation: int
    rank: int
    worker: int
    warm: bool


@dataclass(frozen=True, slots=True)
class GenerationFormed(Fact):
    """`workers[r]` owns rank r; every member stands at `step`; `lost` finished steps have to be run again."""

    durable: ClassVar[bool] = True
    generation: int
    workers: tuple[int, ...]
    step: int
    lost: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecoveryFinished(Fact):
    """Every rank has finished the first step after a fault. `seconds` counts from the fault's detection."""

    durable: ClassVar[bool] = True
    generation: int
    step: int
    lost: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


def _subclasses(kind: type[Fact]) -> dict[str, type[Fact]]:
    # slots=True makes a second class of the same name; the first lingers until it is collected.
    return {sub.__name__: sub for sub in kind.__subclasses__() if "__slots__" in vars(sub)}


_KINDS = _subclasses(Fact)


def fact_from(record: Mapping[str, Any]) -> Fact:
    """The fact that `record()` wrote.

    Raises:
        CoordinationError: the record names no known fact, or lacks a field: it comes from another version.
    """
    kind = _KINDS.get(str(record.get("fact")))
    if kind is None:
        raise CoordinationError(
            f"unknown fact {record.get('fact')!r}", fix="Use one version of resilient_sdk in a run."
        )
    known = {f.name: f for f in fields(kind)}
    values = {name: _thaw(value) for name, value in record.items() if name in known}
    try:
        return kind(**values)
    except TypeError as problem:
        raise CoordinationError(f"incomplete fact {kind.__name__}: {problem}") from problem


def _thaw(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
