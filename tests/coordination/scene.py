"""A run as its coordinator sees it, brought to the point where a test begins.

Everything a scene tells is told to a second coordinator, too, loaded from the JSON of the first one's state:
the two must agree on every order and end in the same state. So each test also proves that a controller which
is killed at any moment is followed by one that goes on identically.
"""

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from resilient_sdk.coordination.commands import Announce, Command, EndRun
from resilient_sdk.coordination.invariants import validate
from resilient_sdk.coordination.machine import Coordinator
from resilient_sdk.coordination.state import Phase, RunState
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    Fact,
    ManifestStored,
    Restored,
    RunStarted,
    StandbyReady,
    StepBegun,
    StepFailed,
    StepFinished,
    StepsDone,
    StepsOffered,
    TrainFailed,
    UploadMissed,
    WorkerExited,
    WorkerStarted,
)

T = TypeVar("T")
SIGKILL = 9
FLOOR_S = 4.0
STARTUP_S = 60.0


def twin(state: RunState) -> Coordinator:
    """A coordinator that knows of `state` only what is on disk."""
    return Coordinator(RunState.load(json.loads(json.dumps(state.record()))))


def only(kind: type[T], commands: Iterable[Command]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def told(kind: type[T], commands: Iterable[Command]) -> list[T]:
    """The announced facts of `kind`."""
    return [c.fact for c in commands if isinstance(c, Announce) and isinstance(c.fact, kind)]


class Scene:
    """`tell` takes facts, the rest is shorthand for facts; all return what was ordered."""

    def __init__(self, nproc: int = 3, standbys: int = 1, max_restarts: int = 5) -> None:
        self.now = 1000.0
        self.c = Coordinator()
        self.first = self.tell(RunStarted(nproc, standbys, max_restarts, FLOOR_S, STARTUP_S))

    @property
    def state(self) -> RunState:
        return self.c.state

    @property
    def generation(self) -> int:
        return self.state.generation

    # ---- facts and time ----

    def tell(self, *facts: Fact) -> list[Command]:
        out: list[Command] = []
        for fact in facts:
            other = twin(self.state)
            now_ordered = self.c.handle(fact, self.now)
            assert other.handle(fact, self.now) == now_ordered
            self._check(other)
            out += now_ordered
        return out

    def tick(self) -> list[Command]:
        other = twin(self.state)
        ordered = self.c.tick(self.now)
        assert other.tick(self.now) == ordered
        self._check(other)
        return ordered

    def _check(self, other: Coordinator) -> None:
        validate(self.state)
        assert other.state == self.state

    def wait(
        self, seconds: float, *, silent: Iterable[int] = (), waiting: Iterable[int] = ()
    ) -> list[Command]:
        """Time passes, with ticks: all workers beat but the `silent`, those `waiting` say so."""
        out: list[Command] = []
        quiet, blocked, end = set(silent), set(waiting), self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for worker in self.state.living():
                if worker.worker not in quiet:
                    beat = Beat(worker.worker, self.generation, worker.step, worker.worker in blocked)
                    out += self.c.handle(beat, self.now)
            out += self.tick()
        return out

    # ---- workers ----

    def owner(self, rank: int) -> int:
        worker = self.state.owners[rank]
        assert worker is not None
        return worker

    def start(self, *workers: int) -> list[Command]:
        return self.tell(*(WorkerStarted(worker, 100 + worker) for worker in workers))

    def ready(self, worker: int, *, warm: bool = True) -> list[Command]:
        return self.tell(StandbyReady(worker, warm))

    def die(self, *workers: int, code: int | None = None) -> list[Command]:
        signal = SIGKILL if code is None else None
        return self.tell(*(WorkerExited(worker, code, signal, self.now) for worker in workers))

    def rejoin(self, *gone: int) -> list[Command]:
        """The agent connects again; `gone` died meanwhile."""
        alive = tuple(w.worker for w in self.state.living() if w.worker not in gone)
        return self.tell(AgentJoined(alive))

    # ---- the way to a step ----

    def offer(self, *steps: int, ranks: Iterable[int] | None = None) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(*(StepsOffered(self.owner(rank), self.generation, steps) for rank in chosen))

    def restore(self, step: int, ranks: Iterable[int] | None = None) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(
            *(Restored(self.owner(r), self.generation, step, "memory", {"restore": 0.1}) for r in chosen)
        )

    def recover(self, step: int) -> list[Command]:
        """A generation that joins comes to stand at `step`."""
        assert self.state.phase == Phase.JOINING
        return self.offer(step) + self.restore(step)

    def begin(self, step: int, ranks: Iterable[int] | None = None) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(*(StepBegun(self.owner(rank), self.generation, step) for rank in chosen))

    def finish(self, step: int, ranks: Iterable[int] | None = None, seconds: float = 0.1) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(
            *(StepFinished(self.owner(r), self.generation, step, seconds, {"loss": float(r)}) for r in chosen)
        )

    def run_step(self, step: int) -> list[Command]:
        return self.begin(step) + self.finish(step)

    def done(self, step: int, ranks: Iterable[int] | None = None) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(*(StepsDone(self.owner(rank), self.generation, step) for rank in chosen))

    # ---- what goes wrong, what is stored ----

    def raises(
        self, rank: int, step: int, *, collective: bool = False, message: str = "boom", at: float = 0.0
    ) -> list[Command]:
        kind = "RuntimeError" if collective else "ValueError"
        return self.tell(
            StepFailed(
                self.owner(rank), self.generation, step, collective, kind, message, f"trace {rank}", at
            )
        )

    def train_raises(self, rank: int, *, at: float = 0.0) -> list[Command]:
        return self.tell(
            TrainFailed(self.owner(rank), self.generation, "KeyError", "lost", f"trace {rank}", at)
        )

    def stored(self, step: int, ranks: Iterable[int] | None = None) -> list[Command]:
        chosen = range(self.state.nproc) if ranks is None else ranks
        return self.tell(
            *(
                ManifestStored(self.owner(r), self.generation, r, step, f"key-{r}-{step}", 10, 0.1)
                for r in chosen
            )
        )

    def missed(self, rank: int, step: int) -> list[Command]:
        return self.tell(UploadMissed(self.owner(rank), self.generation, step, "the store is full"))


def forming(**settings: Any) -> Scene:
    return Scene(**settings)


def joining(**settings: Any) -> Scene:
    scene = Scene(**settings)
    scene.start(*range(len(scene.state.workers)))
    for standby in range(scene.state.nproc, len(scene.state.workers)):
        scene.ready(standby)
    return scene


def restoring(**settings: Any) -> Scene:
    scene = joining(**settings)
    scene.offer()
    return scene


def stepping(step: int = 0, **settings: Any) -> Scene:
    """All ranks have finished `step`; the standbys are warm."""
    scene = restoring(**settings)
    scene.restore(0)
    for number in range(1, step + 1):
        scene.run_step(number)
    return scene


def finishing(step: int = 3, **settings: Any) -> Scene:
    scene = stepping(step, **settings)
    scene.done(step)
    return scene


def recovering(step: int = 3, **settings: Any) -> Scene:
    """Rank 1 of a stepping run died, and its standby joins with the others."""
    scene = stepping(step, **settings)
    scene.die(1)
    return scene


def ended(commands: list[Command]) -> EndRun:
    [end] = only(EndRun, commands)
    return end
