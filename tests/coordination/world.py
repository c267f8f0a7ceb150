"""A simulated world around the coordinator: an agent and workers that obey, as late and as badly as can be.

What holds of the real ones holds here. Orders to one worker arrive in order, and so do its facts, its death
last; between workers there is no order. A controller's death loses the orders that are under way and no fact;
facts that were not acknowledged come again. Memory outlives the worker that wrote it. A step is finished only
when every member of its generation has begun it.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from resilient_sdk.coordination.commands import (
    Announce,
    Command,
    EndRun,
    Finish,
    Go,
    Join,
    KillWorker,
    Leave,
    MoveHead,
    Release,
    RestoreFrom,
    StandBy,
    StartWorker,
    StoreSnapshot,
    Unwind,
)
from resilient_sdk.coordination.invariants import validate
from resilient_sdk.coordination.machine import Coordinator
from resilient_sdk.coordination.state import Phase, Role, RunState
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    DeadlinePaused,
    Fact,
    HeadMoved,
    ManifestStored,
    Restored,
    RestoreFailed,
    RunStarted,
    StandbyPromoted,
    StandbyReady,
    StepBegun,
    StepFailed,
    StepFinished,
    StepsDone,
    StepsOffered,
    TrainReturned,
    UploadMissed,
    WorkerExited,
    WorkerStarted,
)

FLOOR_S = 2.0
STARTUP_S = 20.0
STEPS_IN_MEMORY = 3


def _from(first: int, numbers: Iterable[int]) -> list[int]:
    """`numbers`, those from `first` on before the others."""
    return sorted(numbers, key=lambda number: (number < first, number))


@dataclass
class Worker:
    """One process. `mode`: fresh | warming | ready | settling | stepping | failed | left | done | gone."""

    number: int
    mode: str = "fresh"
    generation: int = 0  # acts for
    newest: int = 0  # was told to join
    rank: int = -1
    step: int = 0
    begun: bool = False
    stands: bool = False
    hung: bool = False  # stopped: neither acts nor beats
    stuck: bool = False  # beats, but its main thread does nothing any more
    paused: bool = False
    late_join: Join | None = None
    last_join: Join | None = None
    answers: list[Fact] = field(default_factory=list)
    target: tuple[int, int] | None = None  # generation and step to upload

    @property
    def alive(self) -> bool:
        return self.mode != "gone"

    @property
    def deaf(self) -> bool:
        return self.hung or self.stuck


class World:
    def __init__(self, nproc: int, standbys: int, max_restarts: int, last_step: int) -> None:
        self.nproc, self.last_step = nproc, last_step
        self.now = 1000.0
        self.c = Coordinator()
        self.workers: dict[int, Worker] = {}
        self.down: dict[int, deque[Command]] = {}
        self.up: dict[int, deque[Fact]] = {}
        self.own: deque[Fact] = deque()  # the controller's own facts
        self.memory: list[set[int]] = [set() for _ in range(nproc)]
        self.store: list[dict[int, int]] = [{} for _ in range(nproc)]  # rank: step -> generation
        self.corrupt: set[tuple[int, int]] = set()
        self.corrupt_ever = False
        self.head = -1
        self.heard: list[Fact] = []
        self.steps_finished = 0
        # what the coordinator has said so far, for the invariants
        self.joins: dict[int, dict[int, int]] = {}
        self.restored: dict[int, dict[int, int]] = {}
        self.keys: dict[str, tuple[int, int, int]] = {}
        self.ends = 0
        self.handle(RunStarted(nproc, standbys, max_restarts, FLOOR_S, STARTUP_S))

    @property
    def state(self) -> RunState:
        return self.c.state

    @property
    def ended(self) -> bool:
        return self.state.phase == Phase.ENDED

    # ---- the controller ----

    def handle(self, fact: Fact) -> None:
        if isinstance(fact, Restored) and fact.generation == self.state.generation:
            speaker = self.state.workers[fact.worker]
            if speaker.role == Role.MEMBER:
                self.restored.setdefault(fact.generation, {})[speaker.place] = fact.step
        self.heard.append(fact)
        self._turn(lambda: self.c.handle(fact, self.now))

    def tick(self) -> None:
        self._turn(lambda: self.c.tick(self.now))

    def _turn(self, act: Callable[[], list[Command]]) -> None:
        before = (self.state.generation, self.state.phase, self.state.head)
        ready = {w.worker for w in self.state.workers if w.role == Role.READY and w.warm}
        commands = act()
        validate(self.state)
        self._check(commands, *before)
        self._check_promotions(commands, ready)
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        if isinstance(command, MoveHead):
            if command.step >= self.head:  # else the store refuses: the last move was lost with a controller
                self.head = command.step
                self.own.append(HeadMoved(command.generation, command.step))
        elif not isinstance(command, Announce | EndRun):
            number: int = command.worker  # type: ignore[attr-defined]  # every travelling command has one
            self.down.setdefault(number, deque()).append(command)

    def restart(self, repeated: int) -> None:
        """The controller is killed and comes back: `repeated` facts were handled and not acknowledged."""
        self.c = Coordinator(RunState.load(json.loads(json.dumps(self.state.record()))))
        self.own.clear()
        self.reconnect(repeated)

    def reconnect(self, repeated: int) -> None:
        for orders in self.down.values():
            orders.clear()
        again = (
            [fact for fact in self.heard[-repeated:] if not isinstance(fact, Beat | StepBegun | AgentJoined)]
            if repeated
            else []
        )
        for fact in reversed(again):
            if hasattr(fact, "worker"):
                self.up[fact.worker].appendleft(fact)
        # The agent counts a worker as there until its death was acknowledged.
        dying = {f.worker for facts in self.up.values() for f in facts if isinstance(f, WorkerExited)}
        self.handle(
            AgentJoined(tuple(w.number for w in self.workers.values() if w.alive or w.number in dying))
        )

    # ---- invariants of what is ordered ----

    def _check(self, commands: list[Command], generation: int, phase: Phase, head: int) -> None:
        s = self.state
        assert s.generation >= generation
        assert s.head >= head
        if phase == Phase.ENDED:
            assert commands == []
        for command in commands:
            if isinstance(command, Leave):
                assert command.generation == generation
            elif isinstance(command, Join):
                self._check_join(command)
            elif hasattr(command, "generation"):
                assert command.generation == s.generation
            if isinstance(command, Go):
                assert self.restored[command.generation] == dict.fromkeys(range(self.nproc), s.restore_step)
            elif isinstance(command, MoveHead):
                assert command.step >= s.head
                made = [self.keys[key] for key in command.keys]
                assert made == [(s.generation, rank, command.step) for rank in range(self.nproc)]
            elif isinstance(command, EndRun):
                self._check_end(command)
        if s.generation > generation:
            assert set(self.joins[s.generation]) == set(range(self.nproc))
        assert self.ends == (s.phase == Phase.ENDED)

    def _check_end(self, end: EndRun) -> None:
        self.ends += 1
        assert end.outcome
        assert end.message
        assert self.corrupt_ever or end.error.get("kind") != "NothingToRestore"
        if end.message.startswith("no standby"):
            assert (self.state.restarts, self.state.owed) == (self.state.max_restarts, 0)

    def _check_join(self, join: Join) -> None:
        owners = self.joins.setdefault(join.generation, {})
        assert owners.setdefault(join.rank, join.worker) == join.worker
        assert max(Counter(owners.values()).values()) == 1
        assert join.generation == self.state.generation

    def _check_promotions(self, commands: list[Command], ready: set[int]) -> None:
        promoted = [
            c.fact for c in commands if isinstance(c, Announce) and isinstance(c.fact, StandbyPromoted)
        ]
        left_waiting = {w.worker for w in self.state.workers if w.worker in ready and w.role == Role.READY}
        assert not (left_waiting and any(not fact.warm for fact in promoted))

    # ---- the agent ----

    def deliver_down(self, number: int) -> None:
        orders = self.down.get(number)
        if not orders:
            return
        order = orders.popleft()
        worker = self.workers.get(number)
        if isinstance(order, StartWorker):
            if worker is None:
                self.workers[number] = Worker(number)
                self.up[number] = deque([WorkerStarted(number, 100 + number)])
        elif worker is not None and worker.alive:
            if isinstance(order, KillWorker):
                self.die(number, None)
            elif worker.deaf:
                return  # it lies in its inbox for ever
            else:
                self._obey(worker, order)

    def deliver_up(self, number: int) -> None:
        facts = self.up.get(number)
        if facts:
            self.handle(facts.popleft())

    def die(self, number: int, code: int | None) -> None:
        worker = self.workers[number]
        if worker.alive:
            worker.mode = "gone"
            self.up[number].append(WorkerExited(number, code, 9 if code is None else None, self.now))

    def say(self, worker: Worker, fact: Fact) -> None:
        self.up[worker.number].append(fact)

    def answer(self, worker: Worker, fact: Fact) -> None:
        worker.answers.append(fact)
        self.say(worker, fact)

    # ---- a worker ----

    def _obey(self, worker: Worker, order: Command) -> None:
        if isinstance(order, StandBy) and worker.mode == "fresh":
            worker.mode = "warming"
        elif isinstance(order, Join):
            self._hear_join(worker, order)
        elif isinstance(order, StoreSnapshot):
            self._aim(worker, (order.generation, order.step))
        elif isinstance(order, Leave | RestoreFrom | Go | Finish):
            if order.generation == worker.generation:
                self._obey_of_generation(worker, order)
        elif isinstance(order, Release):
            self.die(worker.number, 0)
        elif isinstance(order, Unwind):
            self.die(worker.number, 1)

    def _obey_of_generation(self, worker: Worker, order: Leave | RestoreFrom | Go | Finish) -> None:
        if isinstance(order, Leave):
            worker.mode, worker.begun = "left", False
        elif isinstance(order, RestoreFrom):
            self._restore(worker, order)
        elif isinstance(order, Go) and worker.mode == "settling" and worker.stands:
            worker.mode = "stepping"
        elif isinstance(order, Finish) and worker.mode == "done":
            self.return_from_train(worker.number)

    def return_from_train(self, number: int) -> None:
        worker = self.workers[number]
        if worker.alive and worker.mode != "warming" and worker.rank >= 0:
            self.say(worker, TrainReturned(number))
            self.die(number, 0)

    def _hear_join(self, worker: Worker, join: Join) -> None:
        if join == worker.last_join:
            for fact in list(worker.answers):
                self.say(worker, fact)
            return
        assert join.generation > worker.newest
        worker.last_join, worker.newest = join, join.generation
        if worker.mode == "warming":
            worker.late_join = join
        else:
            self._enter(worker, join)

    def _enter(self, worker: Worker, join: Join) -> None:
        worker.generation, worker.rank, worker.mode = join.generation, join.rank, "settling"
        worker.begun = worker.stands = False
        worker.answers = []
        self.answer(worker, StepsOffered(worker.number, join.generation, tuple(self._offers(join.rank))))

    def _offers(self, rank: int) -> list[int]:
        return sorted(self.memory[rank] | {s for s in self.store[rank] if s <= self.head}, reverse=True)

    def _restore(self, worker: Worker, order: RestoreFrom) -> None:
        if worker.mode != "settling":
            return
        rank, step = worker.rank, order.step
        if not order.scratch and (rank, step) in self.corrupt:
            self.say(worker, RestoreFailed(worker.number, worker.generation, step, "corrupt"))
            return
        self.memory[rank] = {s for s in self.memory[rank] if s < step} | {step}
        worker.step, worker.stands = step, True
        self.answer(worker, Restored(worker.number, worker.generation, step, "memory"))

    def act(self, number: int) -> None:
        """Its main thread goes on to the next thing that it says."""
        worker = self.workers.get(number)
        if worker is None or not worker.alive or worker.deaf:
            return
        if worker.paused:
            self.pause(number, paused=False)
        elif worker.mode == "warming":
            worker.mode = "ready"
            self.say(worker, StandbyReady(number, warm=True))
            if worker.late_join is not None:
                self._enter(worker, worker.late_join)
        elif worker.mode == "stepping" and worker.begun:
            self._leave_collective(worker)
        elif worker.mode == "stepping" and worker.step == self.last_step:
            worker.mode = "done"
            self.answer(worker, StepsDone(number, worker.generation, worker.step))
        elif worker.mode == "stepping":
            worker.begun = True
            self.say(worker, StepBegun(number, worker.generation, worker.step + 1))

    def peers(self, worker: Worker) -> list[Worker]:
        return [self.workers[number] for number in self.joins[worker.generation].values()]

    def whole(self, worker: Worker) -> bool:
        """Whether every member has given its part to the collective that `worker` waits in."""
        parts = [
            (peer.step + peer.begun, peer.generation) for peer in self.peers(worker) if peer is not worker
        ]
        return all(generation == worker.generation and step > worker.step for step, generation in parts)

    def _leave_collective(self, worker: Worker) -> None:
        number = worker.number
        if self.whole(worker):
            worker.begun = False
            worker.step += 1
            kept = sorted({*self.memory[worker.rank], worker.step})[-STEPS_IN_MEMORY:]
            self.memory[worker.rank] = set(kept)
            self.corrupt.discard((worker.rank, worker.step))
            self.steps_finished += worker.rank == 0
            self.say(worker, StepFinished(number, worker.generation, worker.step, 0.1))
        elif any(not peer.alive for peer in self.peers(worker)):
            self.fail(number, collective=True, message="connection closed by peer")

    def pause(self, number: int, *, paused: bool) -> None:
        worker = self.workers[number]
        if worker.alive and not worker.deaf and worker.mode == "stepping":
            self.say(worker, DeadlinePaused(number, worker.generation, paused))
        worker.paused = paused and worker.mode == "stepping" and not worker.deaf

    def fail(self, number: int, *, collective: bool, message: str) -> None:
        """An exception leaves its step."""
        worker = self.workers[number]
        if worker.alive and not worker.deaf and worker.mode == "stepping":
            worker.mode, worker.begun = "failed", False
            self.say(
                worker,
                StepFailed(
                    number, worker.generation, worker.step, collective, "Error", message, "", self.now
                ),
            )

    # ---- uploads ----

    def _aim(self, worker: Worker, target: tuple[int, int]) -> None:
        if worker.target is not None:
            self.say(worker, UploadMissed(worker.number, *worker.target, "another was asked for"))
        worker.target = target

    def upload(self, number: int, *, fails: bool = False) -> None:
        worker = self.workers.get(number)
        if worker is None or not worker.alive or worker.hung or worker.target is None:
            return
        generation, step = worker.target
        memory = self.memory[worker.rank]
        if fails or (step not in memory and memory and max(memory) > step):
            self.say(worker, UploadMissed(number, generation, step, "gone"))
        elif step in memory and generation == worker.generation:
            key = f"{generation}-{worker.rank}-{step}"
            self.keys[key] = (generation, worker.rank, step)
            self.store[worker.rank][step] = generation
            self.say(worker, ManifestStored(number, generation, worker.rank, step, key, 1, 0.1))
        else:
            return
        worker.target = None

    # ---- time, and a world that means well ----

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for worker in list(self.workers.values()):
                if worker.alive and not worker.hung and not self.up[worker.number]:
                    waiting = worker.mode == "stepping" and worker.begun and not worker.stuck
                    self.handle(Beat(worker.number, worker.newest, worker.step, waiting))
            self.tick()

    def flow(self, rounds: int, first: int = 0) -> None:
        """Everything under way arrives, everybody acts, worker `first` first."""
        for _ in range(rounds):
            if self.ended:
                return
            while self.own:
                self.handle(self.own.popleft())
            self.all_orders_arrive(first)
            self.all_act(first)
            self.all_facts_arrive(first)

    def all_orders_arrive(self, first: int) -> None:
        for number in _from(first, self.down):
            while self.down[number]:
                self.deliver_down(number)

    def all_act(self, first: int) -> None:
        for number in _from(first, self.workers):
            self.act(number)
            self.upload(number)

    def all_facts_arrive(self, first: int) -> None:
        for number in _from(first, self.up):
            while self.up[number]:
                self.deliver_up(number)

    def settle(self, steps: int = 2) -> None:
        """The adversary has stopped: within bounds the run steps again, or has ended with a reason."""
        goal = self.steps_finished + steps
        for _ in range(200):
            self.flow(2)
            if self.ended or self.steps_finished >= goal:
                return
            self.pass_time(1.0)
        raise AssertionError(f"the run neither steps nor ends: {self.describe()}")

    def describe(self) -> dict[str, Any]:
        return {"state": self.state.record(), "workers": self.workers, "down": self.down, "up": self.up}
