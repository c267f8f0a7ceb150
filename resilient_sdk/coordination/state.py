"""All that the coordinator knows of a run. Plain values: it is written to disk and read back as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from resilient_sdk.errors import InvalidTransition


class Role(StrEnum):
    """What a worker is now."""

    ORDERED = "ordered"  # its agent was told to start it
    FRESH = "fresh"  # it runs and was told nothing yet
    WARMING = "warming"  # a standby runs the user's code up to its first step
    READY = "ready"  # a standby waits
    MEMBER = "member"  # it owns a rank
    GONE = "gone"


class Phase(StrEnum):
    """Where the newest generation stands."""

    FORMING = "forming"  # a rank has no owner
    JOINING = "joining"  # members were told their ranks and say what they can restore
    RESTORING = "restoring"  # members go to the common step
    STEPPING = "stepping"
    FINISHING = "finishing"  # every member has done its last step
    ENDED = "ended"


@dataclass(slots=True)
class WorkerState:
    """One worker. `step` is the optimizer step it last began, `finished` the last one it finished.

    `warm`: it has run a step, rehearsed or real, so that the next one takes no longer than usual. `begun`: it
    was told to train, so that its model is not any more what the user's code had made. `acting`: the newest
    generation that it is known to have acted in, the one that it first joined or was last told to train in.
    """

    worker: int
    role: Role = Role.ORDERED
    rank: int | None = None
    pid: int = 0
    warm: bool = False
    note: str = ""
    step: int = 0
    finished: int = 0
    beat_at: float = 0.0
    waiting: bool = False
    paused: bool = False
    begun: bool = False
    acting: int = 0
    returned: bool = False
    blamed: str = ""  # why it was ordered to be killed

    @property
    def place(self) -> int:
        """The rank it owns.

        Raises:
            InvalidTransition: it owns none (a defect).
        """
        if self.rank is None:
            raise InvalidTransition(f"worker {self.worker} owns no rank", role=self.role)
        return self.rank


@dataclass(slots=True)
class RunState:
    """One run. Times are monotonic seconds of the coordinator's machine; 0.0 means never."""

    nproc: int = 0
    standbys: int = 0
    max_restarts: int = 0
    stall_floor_s: float = 0.0
    startup_s: float = 0.0

    phase: Phase = Phase.FORMING
    phase_since: float = 0.0
    generation: int = 0
    workers: list[WorkerState] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)  # owners[rank] is a worker
    history: list[list[int]] = field(default_factory=list)  # history[rank]: its owners, oldest first
    restarts: int = 0
    owed: int = 0  # new workers that will replace dead ones, not ordered yet
    deaths_in_row: int = 0
    retries_in_row: int = 0

    restores: bool = False  # the generation will not start from scratch, whatever its members offer
    offers: dict[str, list[int]] = field(default_factory=dict)  # by rank
    restored: list[int] = field(default_factory=list)  # ranks
    restore_step: int = 0
    scratch: bool = False
    done: list[int] = field(default_factory=list)  # ranks

    head: int = -1  # the step that the store's head names
    best: int = 0  # the newest step that every rank has finished
    target: int = -1  # the step that every rank uploads next
    stored: dict[str, str] = field(default_factory=dict)  # rank -> manifest's key, for `target`
    missed: int = 0  # steps that were finished and not uploaded because the store was behind
    lost: int = 0  # finished steps that had to be run again, all recoveries together
    recoveries: int = 0

    pending: list[dict[str, Any]] = field(default_factory=list)  # failures of this generation, no verdict yet
    verdict_at: float = 0.0
    first_failures: list[dict[str, Any]] = field(default_factory=list)  # one for each distinct failure
    broken_at: float = 0.0  # when the recovery that is under way began
    recovery_phases: dict[str, float] = field(default_factory=dict)
    recovery_lost: int = 0  # finished steps that the recovery under way has to run again

    awake_at: float = 0.0  # when the coordinator last looked
    progress_at: float = 0.0
    durations: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    outcome: str = ""
    message: str = ""
    error: dict[str, Any] = field(default_factory=dict)

    # ---- questions ----

    def members(self) -> list[WorkerState]:
        """The owners of ranks, in rank order, vacant ranks left out."""
        return [self.workers[w] for w in self.owners if w is not None]

    def living(self) -> list[WorkerState]:
        return [w for w in self.workers if w.role not in (Role.GONE, Role.ORDERED)]

    def vacancies(self) -> list[int]:
        return [rank for rank, owner in enumerate(self.owners) if owner is None]

    def candidates(self) -> list[WorkerState]:
        """Who may take a rank, best first: a warm standby, a cold one, a fresh worker, one still warming."""
        order = {Role.READY: 0, Role.FRESH: 2, Role.WARMING: 3}
        free = [w for w in self.workers if w.role in order]
        return sorted(free, key=lambda w: (order[w.role] + (w.role == Role.READY and not w.warm), w.worker))

    def is_calm(self) -> bool:
        """Whether no recovery is under way: its first step is committed, or a second one done where the store
        is late."""
        settled = self.generation == 1 or self.head > self.restore_step or self.best > self.restore_step + 1
        return self.phase == Phase.STEPPING and not self.broken_at and settled

    def has_trained(self) -> bool:
        """Whether a step was finished, or a member told to train: its model is changed, and no start any more."""
        return self.best > 0 or any(worker.begun for worker in self.members())

    def step_seconds(self) -> float:
        """The median of the last step times, or 0.0."""
        return median(self.durations) if self.durations else 0.0

    # ---- to disk and back ----

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, record: Mapping[str, Any]) -> "RunState":
        values = dict(record)
        values["phase"] = Phase(values["phase"])
        values["workers"] = [WorkerState(**{**w, "role": Role(w["role"])}) for w in values["workers"]]
        return cls(**values)
