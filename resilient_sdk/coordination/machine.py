"""The coordinator: facts in, commands out. No clock, socket, thread or tensor; time comes in as data.

After dask's worker_state_machine: state is mutated only in `handle`, which returns orders and executes none.
"""

from collections.abc import Callable
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
    NoteHead,
    Release,
    RestoreFrom,
    StandBy,
    StartWorker,
    StoreSnapshot,
    Unwind,
)
from resilient_sdk.coordination.stall import find_stall
from resilient_sdk.coordination.state import Phase, Role, RunState, WorkerState
from resilient_sdk.errors import InvalidTransition
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    DeadlinePaused,
    Fact,
    GenerationBroken,
    GenerationFormed,
    HeadMoved,
    ManifestStored,
    RankLost,
    RecoveryFinished,
    Restored,
    RestoreFailed,
    RunEnded,
    RunResumed,
    RunStarted,
    StandbyPromoted,
    StandbyReady,
    StepBegun,
    StepFailed,
    StepFinished,
    StepsDone,
    StepsOffered,
    StopRequested,
    TrainFailed,
    TrainReturned,
    UploadMissed,
    WorkerExited,
    WorkerStarted,
)

VERDICT_S = 0.5
"""How long a failure waits for the death of a peer to explain it."""
MAX_RETRIES_IN_ROW = 3
"""Generations that broke without a death and without a step between them before the run is given up."""
GRACE_S = 10.0
"""What workers get to leave the user's code at the end of a run before they are killed."""
DURATIONS_KEPT = 32


class Coordinator:
    """One run's decisions.

    Args:
        state: where to go on from; None: a run that has not started.
    """

    def __init__(self, state: RunState | None = None) -> None:
        self.state = state if state is not None else RunState()
        self._out: list[Command] = []
        self._now = 0.0

    def handle(self, fact: Fact, now: float) -> list[Command]:
        """Takes one fact and returns what is to be done, in order.

        A fact of an older generation, or of a worker that no longer owns its rank, changes nothing.

        Raises:
            InvalidTransition: a fact that nobody may report (a defect).
        """
        self._out, self._now = [], now
        handler = _HANDLERS.get(type(fact))
        if handler is None:
            raise InvalidTransition(
                f"{type(fact).__name__} is not for the coordinator", state=self.state.phase
            )
        if self.state.phase != Phase.ENDED or isinstance(fact, RunResumed):
            handler(self, fact)
        return self._out

    def tick(self, now: float) -> list[Command]:
        """Time has passed: verdicts and deadlines that are due."""
        self._out, self._now = [], now
        s = self.state
        if s.pending and s.phase in _FORMED and now >= s.verdict_at:
            self._judge()
        stall = find_stall(s, now)
        if stall is not None and not s.pending:
            self._break_stall(stall.culprits, stall.cause)
        return self._out

    # ---- the run ----

    def _run_started(self, fact: RunStarted) -> None:
        s = self.state
        s.nproc, s.standbys, s.max_restarts = fact.nproc, fact.standbys, fact.max_restarts
        s.stall_floor_s, s.startup_s = fact.stall_floor_s, fact.startup_s
        s.owners = [None] * fact.nproc
        s.history = [[] for _ in range(fact.nproc)]
        self._populate()

    def _run_resumed(self, _: RunResumed) -> None:
        s = self.state
        for worker in s.workers:
            worker.role = Role.GONE
        s.owners = [None] * s.nproc
        s.restarts = s.owed = s.deaths_in_row = s.retries_in_row = 0
        s.outcome = s.message = ""
        s.error = {}
        s.first_failures, s.broken_at = [], 0.0
        # Memory may be gone with the workers; what the head names is what the run has.
        s.best = max(s.head, 0)
        self._enter(Phase.FORMING)
        self._populate()

    def _populate(self) -> None:
        for _ in range(self.state.nproc + self.state.standbys):
            self._start_worker()

    def _start_worker(self) -> None:
        worker = WorkerState(len(self.state.workers))
        self.state.workers.append(worker)
        self._out.append(StartWorker(worker.worker))

    def _stop_requested(self, fact: StopRequested) -> None:
        self._end("stopped", fact.reason)

    def _end(self, outcome: str, message: str, error: dict[str, Any] | None = None) -> None:
        s = self.state
        s.outcome, s.message, s.error = outcome, message, error or {}
        self._enter(Phase.ENDED)
        for worker in s.living():
            self._out.append(Unwind(worker.worker, message))
        self._out.append(Announce(RunEnded(outcome, message, s.error)))
        self._out.append(EndRun(outcome, message, s.error, GRACE_S))

    def _enter(self, phase: Phase) -> None:
        self.state.phase, self.state.phase_since = phase, self._now

    # ---- workers ----

    def _agent_joined(self, fact: AgentJoined) -> None:
        for worker in self.state.workers:
            if worker.role == Role.ORDERED:
                self._out.append(StartWorker(worker.worker))
        for worker in self.state.living():
            if worker.worker not in fact.workers:
                self._worker_exited(WorkerExited(worker.worker, None, None, self._now))
        self._repeat_orders()

    def _repeat_orders(self) -> None:
        # Orders given just before a controller died may not have arrived. All of them may be repeated.
        s = self.state
        for worker in s.living():
            if worker.role == Role.WARMING:
                self._out.append(StandBy(worker.worker))
            elif worker.role == Role.MEMBER and s.phase in _FORMED:
                self._out.append(self._join_order(worker))
            elif worker.role == Role.MEMBER and s.phase == Phase.FORMING:
                self._out.append(Leave(worker.worker, s.generation))
            elif worker.role == Role.MEMBER and s.phase == Phase.FINISHING:
                self._out.append(Finish(worker.worker, s.generation))
        if s.phase == Phase.RESTORING:
            self._order_restore()

    def _join_order(self, worker: WorkerState) -> Join:
        assert worker.rank is not None
        return Join(worker.worker, self.state.generation, worker.rank, self.state.nproc)

    def _worker_started(self, fact: WorkerStarted) -> None:
        worker = self.state.workers[fact.worker]
        if worker.role != Role.ORDERED:
            return
        worker.role, worker.pid, worker.beat_at = Role.FRESH, fact.pid, self._now
        if self.state.phase == Phase.FORMING:
            self._fill()
        self._settle_fresh()

    def _settle_fresh(self) -> None:
        s = self.state
        for worker in s.workers:
            if worker.role != Role.FRESH or s.phase == Phase.FORMING:
                continue
            if s.phase in (Phase.FINISHING, Phase.ENDED):
                self._out.append(Release(worker.worker))
            else:
                worker.role = Role.WARMING
                self._out.append(StandBy(worker.worker))

    def _standby_ready(self, fact: StandbyReady) -> None:
        worker = self.state.workers[fact.worker]
        worker.warm, worker.note = fact.warm, fact.note
        if worker.role == Role.WARMING:
            worker.role = Role.READY
            self._fill()

    def _worker_exited(self, fact: WorkerExited) -> None:
        s = self.state
        worker = s.workers[fact.worker]
        if worker.role == Role.GONE:
            return
        was, worker.role = worker.role, Role.GONE
        if s.phase == Phase.FINISHING:
            self._exited_at_the_end(worker, was, fact)
            return
        if was == Role.MEMBER and worker.returned and fact.code == 0:
            self._end_if_all_returned()
            return
        if was == Role.MEMBER:
            s.broken_at = s.broken_at or self._now
        self._replace_worker()
        if was == Role.MEMBER:
            self._rank_lost(worker, fact)
        elif s.phase == Phase.FORMING:
            self._fill()

    def _exited_at_the_end(self, worker: WorkerState, was: Role, fact: WorkerExited) -> None:
        if was != Role.MEMBER:
            return
        if fact.code == 0:
            self._end_if_all_returned()
        else:
            how = _describe(fact)
            self._end(
                "failed", f"rank {worker.rank} {how} after its last step", {"rank": worker.rank, "kind": how}
            )

    def _end_if_all_returned(self) -> None:
        s = self.state
        if all(w.role == Role.GONE for w in s.members()):
            self._end("finished", f"finished at step {s.best}")

    def _replace_worker(self) -> None:
        """Owes a new standby for a dead worker. One that is not needed now waits until the recovery is over:
        its warm-up would take the processors from those who recover."""
        s = self.state
        if s.restarts < s.max_restarts:
            s.restarts += 1
            s.owed += 1
        if not s.broken_at and s.phase == Phase.STEPPING:
            self._pay_owed(s.owed)

    def _pay_owed(self, count: int) -> None:
        for _ in range(min(count, self.state.owed)):
            self.state.owed -= 1
            self._start_worker()

    def _rank_lost(self, worker: WorkerState, fact: WorkerExited) -> None:
        s = self.state
        rank, how = worker.rank, worker.blamed or _describe(fact)
        assert rank is not None
        s.owners[rank] = None
        s.deaths_in_row += 1
        self._out.append(Announce(RankLost(s.generation, rank, worker.worker, how)))
        if fact.code is not None and fact.code != _LEFT:
            failure = {
                "kind": "exit",
                "message": how,
                "rank": rank,
                "step": worker.step,
                "at": fact.at,
                "traceback": "",
            }
            if self._seen_before(failure):
                self._end("failed", f"rank {rank} {how} at step {worker.step}, twice", failure)
                return
        if s.deaths_in_row >= max(6, 2 * s.nproc):
            self._end(
                "failed",
                f"{s.deaths_in_row} ranks died in a row without a finished step",
                {"rank": rank, "kind": how},
            )
            return
        if s.phase == Phase.FORMING:
            self._fill()
        else:
            self._break_generation(f"rank {rank} {how}")

    # ---- generations ----

    def _break_generation(self, cause: str) -> None:
        s = self.state
        self._out.append(Announce(GenerationBroken(s.generation, cause)))
        for worker in s.members():
            if worker.role == Role.GONE:
                # It returned from train() early; its rank still has steps to run.
                s.owners[s.owners.index(worker.worker)] = None
            else:
                self._out.append(Leave(worker.worker, s.generation))
        if not s.broken_at:
            s.broken_at = self._now
        s.pending = []
        self._enter(Phase.FORMING)
        self._fill()

    def _fill(self) -> None:
        """Gives every vacant rank an owner, all at once or not at all: a group forms only when it is whole."""
        s = self.state
        if s.phase != Phase.FORMING:
            return
        vacancies, candidates = s.vacancies(), s.candidates()
        coming = sum(w.role == Role.ORDERED for w in s.workers)
        self._pay_owed(len(vacancies) - len(candidates) - coming)
        coming = sum(w.role == Role.ORDERED for w in s.workers)
        if len(candidates) >= len(vacancies):
            self._form(list(zip(vacancies, candidates, strict=False)))
        elif len(candidates) + coming < len(vacancies):
            names = ", ".join(str(rank) for rank in vacancies)
            self._end("no_standby", f"no standby is left for rank {names}")

    def _form(self, promotions: list[tuple[int, WorkerState]]) -> None:
        s = self.state
        s.generation += 1
        for rank, worker in promotions:
            if s.generation > 1:
                self._out.append(Announce(StandbyPromoted(s.generation, rank, worker.worker, worker.warm)))
            worker.role, worker.rank = Role.MEMBER, rank
            s.owners[rank] = worker.worker
            s.history[rank].append(worker.worker)
        s.offers, s.restored, s.done, s.stored = {}, [], [], {}
        s.target = -1
        self._enter(Phase.JOINING)
        for worker in s.members():
            worker.paused = worker.waiting = False
            self._out.append(self._join_order(worker))
        self._settle_fresh()

    def _owner(self, worker: int, generation: int) -> WorkerState | None:
        """The member that may speak for `generation`; None for whoever is late or dead: it is not heard."""
        s = self.state
        found = s.workers[worker]
        if generation != s.generation or found.role != Role.MEMBER or s.phase in (Phase.FORMING, Phase.ENDED):
            return None
        return found

    def _steps_offered(self, fact: StepsOffered) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None or s.phase not in (Phase.JOINING, Phase.RESTORING):
            return
        s.offers[str(worker.rank)] = list(fact.steps)
        if s.phase == Phase.JOINING and len(s.offers) == s.nproc:
            self._choose_step()

    def _choose_step(self) -> None:
        s = self.state
        common = set.intersection(*(set(steps) for steps in s.offers.values()))
        if not common and s.best > 0:
            self._end("failed", f"no step is left that every rank can restore (step {s.best} was finished)",
                      {"kind": "NothingToRestore", "offers": dict(s.offers)})  # fmt: skip
            return
        s.restore_step, s.scratch = max(common, default=0), not common
        s.restored = []
        self._enter(Phase.RESTORING)
        self._order_restore()

    def _order_restore(self) -> None:
        s = self.state
        for worker in s.members():
            self._out.append(RestoreFrom(worker.worker, s.generation, s.restore_step, s.scratch))

    def _restore_failed(self, fact: RestoreFailed) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None or s.phase != Phase.RESTORING or fact.step != s.restore_step:
            return
        rank = str(worker.rank)
        s.offers[rank] = [step for step in s.offers[rank] if step != fact.step]
        self._choose_step()

    def _restored(self, fact: Restored) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None or s.phase != Phase.RESTORING or fact.step != s.restore_step:
            return
        assert worker.rank is not None
        worker.step = worker.finished = fact.step
        if worker.rank not in s.restored:
            s.restored.append(worker.rank)
        for name, seconds in fact.phases.items():
            s.recovery_phases[name] = max(seconds, s.recovery_phases.get(name, 0.0))
        if len(s.restored) == s.nproc:
            self._go()

    def _go(self) -> None:
        s = self.state
        self._enter(Phase.STEPPING)
        lost = max(s.best - s.restore_step, 0)
        s.lost += lost
        s.best = s.restore_step
        workers = tuple(w.worker for w in s.members())
        phases = dict(s.recovery_phases) if s.broken_at else {}
        self._out.append(Announce(GenerationFormed(s.generation, workers, s.restore_step, lost, phases)))
        for worker in s.members():
            self._out.append(Go(worker.worker, s.generation))
        self._aim(s.restore_step + 1)

    # ---- steps ----

    def _beat(self, fact: Beat) -> None:
        worker = self.state.workers[fact.worker]
        worker.beat_at, worker.waiting = self._now, fact.waiting

    def _deadline_paused(self, fact: DeadlinePaused) -> None:
        worker = self._owner(fact.worker, fact.generation)
        if worker is not None:
            worker.paused = fact.paused
            self.state.progress_at = self._now

    def _step_begun(self, fact: StepBegun) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None:
            return
        worker.step, worker.beat_at = fact.step, self._now
        if s.phase in (Phase.JOINING, Phase.RESTORING):
            # Only after Go does a step begin: the order was given by a controller that died since.
            self._enter(Phase.STEPPING)
            self._aim(fact.step)
        s.progress_at = self._now

    def _step_finished(self, fact: StepFinished) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None:
            return
        worker.finished = worker.step = fact.step
        worker.beat_at = s.progress_at = self._now
        s.durations = [*s.durations[-(DURATIONS_KEPT - 1) :], fact.seconds]
        if worker.rank == 0:
            s.metrics = dict(fact.metrics)
        slowest = min(w.finished for w in s.members())
        if slowest > s.best:
            s.best = slowest
            s.deaths_in_row = s.retries_in_row = 0
            self._announce_recovery(slowest)

    def _announce_recovery(self, step: int) -> None:
        s = self.state
        if not s.broken_at:
            return
        seconds = self._now - s.broken_at
        s.recoveries += 1
        self._out.append(
            Announce(RecoveryFinished(s.generation, step, s.lost, seconds, dict(s.recovery_phases)))
        )
        s.broken_at, s.recovery_phases = 0.0, {}
        self._pay_owed(s.owed)

    def _step_failed(self, fact: StepFailed) -> None:
        worker = self._owner(fact.worker, fact.generation)
        if worker is not None and self.state.phase in _FORMED:
            self._suspect(worker, fact.record(), fact.step)

    def _train_failed(self, fact: TrainFailed) -> None:
        worker = self._owner(fact.worker, fact.generation)
        if worker is None:
            return
        record = {**fact.record(), "collective": False, "fatal": True}
        if self.state.phase in _FORMED:
            self._suspect(worker, record, worker.step)
        else:
            self._fail({**record, "rank": worker.rank, "step": worker.step})

    def _suspect(self, worker: WorkerState, record: dict[str, Any], step: int) -> None:
        s = self.state
        if any(failure["worker"] == worker.worker for failure in s.pending):
            return
        if not s.pending:
            s.verdict_at = self._now + VERDICT_S
        s.pending.append({**record, "rank": worker.rank, "step": step})
        if len(s.pending) == s.nproc:
            self._judge()

    def _judge(self) -> None:
        """No death explains the failures: the user's code failed, or a collective did."""
        s = self.state
        own = [f for f in s.pending if not f["collective"]]
        first = min(own or s.pending, key=lambda f: float(f["at"]))
        s.retries_in_row += 1
        hopeless = s.retries_in_row > MAX_RETRIES_IN_ROW
        if own and (first.get("fatal") or self._seen_before(first)) or hopeless:
            self._fail(first)
            return
        self._break_generation(f"rank {first['rank']} raised {first['kind']} at step {first['step']}")

    def _seen_before(self, failure: dict[str, Any]) -> bool:
        for earlier in self.state.first_failures:
            if all(earlier[name] == failure[name] for name in ("kind", "message", "step")):
                return True
        self.state.first_failures.append(failure)
        return False

    def _fail(self, failure: dict[str, Any]) -> None:
        first = min(
            [
                f
                for f in self.state.first_failures
                if f["kind"] == failure["kind"] and f["step"] == failure["step"]
            ]
            + [failure],
            key=lambda f: float(f["at"]),
        )
        where = f"rank {first['rank']} at step {first['step']}"
        self._end("failed", f"{first['kind']} on {where}: {first['message']}", first)

    def _break_stall(self, culprits: tuple[int, ...], cause: str) -> None:
        s = self.state
        early = [w.rank for w in s.members() if w.role == Role.GONE]
        if early and s.phase == Phase.STEPPING:
            message = f"rank {early[0]} returned from train() while its peers still step"
            self._end("failed", message, {"rank": early[0], "kind": "returned"})
            return
        for worker in culprits:
            s.workers[worker].blamed = cause
            self._out.append(KillWorker(worker))
        if culprits:
            # Their deaths will be reported; until then nobody else is blamed.
            s.progress_at = self._now
            return
        s.retries_in_row += 1
        if s.retries_in_row > MAX_RETRIES_IN_ROW:
            self._end("failed", cause, {"kind": "Stalled"})
        else:
            self._break_generation(cause)

    def _steps_done(self, fact: StepsDone) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None or worker.rank in s.done:
            return
        assert worker.rank is not None
        s.done.append(worker.rank)
        s.progress_at = self._now
        if s.phase in (Phase.JOINING, Phase.RESTORING):
            self._enter(Phase.STEPPING)
        if len(s.done) == s.nproc:
            self._finish()

    def _finish(self) -> None:
        s = self.state
        self._announce_recovery(s.best)
        self._enter(Phase.FINISHING)
        for worker in s.members():
            self._out.append(Finish(worker.worker, s.generation))
        for worker in s.living():
            if worker.role != Role.MEMBER:
                self._out.append(Release(worker.worker))

    def _train_returned(self, fact: TrainReturned) -> None:
        self.state.workers[fact.worker].returned = True

    # ---- the store ----

    def _aim(self, step: int) -> None:
        """Names the step that every member uploads next."""
        s = self.state
        s.target, s.stored = step, {}
        for worker in s.members():
            self._out.append(StoreSnapshot(worker.worker, s.generation, step))

    def _next_aim(self) -> None:
        # The step under way: every member will have it, or still holds it in memory.
        s = self.state
        newest = max(max(w.step, w.finished) for w in s.members())
        aim = max(s.target + 1, newest)
        s.missed += aim - s.target - 1
        self._aim(aim)

    def _manifest_stored(self, fact: ManifestStored) -> None:
        s = self.state
        worker = self._owner(fact.worker, fact.generation)
        if worker is None or worker.rank != fact.rank or fact.step != s.target:
            return
        s.stored[str(fact.rank)] = fact.key
        if len(s.stored) == s.nproc:
            keys = tuple(s.stored[str(rank)] for rank in range(s.nproc))
            self._out.append(MoveHead(s.generation, fact.step, keys))
            self._next_aim()

    def _upload_missed(self, fact: UploadMissed) -> None:
        worker = self._owner(fact.worker, fact.generation)
        if worker is not None and fact.step == self.state.target:
            self.state.missed += 1
            self._next_aim()

    def _head_moved(self, fact: HeadMoved) -> None:
        s = self.state
        s.head = max(s.head, fact.step)
        for worker in s.members():
            self._out.append(NoteHead(worker.worker, s.head))


_FORMED = (Phase.JOINING, Phase.RESTORING, Phase.STEPPING)
_LEFT = 75
"""Exit status of a worker that a peer's death threw out of the user's code (EX_TEMPFAIL): not its own failure."""


def _describe(fact: WorkerExited) -> str:
    if fact.signal is not None:
        return f"was killed by signal {fact.signal}"
    if fact.code is None:
        return "vanished"
    return f"exited with status {fact.code}"


_HANDLERS: dict[type[Fact], Callable[[Coordinator, Any], None]] = {
    RunStarted: Coordinator._run_started,
    RunResumed: Coordinator._run_resumed,
    StopRequested: Coordinator._stop_requested,
    AgentJoined: Coordinator._agent_joined,
    WorkerStarted: Coordinator._worker_started,
    WorkerExited: Coordinator._worker_exited,
    StandbyReady: Coordinator._standby_ready,
    StepsOffered: Coordinator._steps_offered,
    Restored: Coordinator._restored,
    RestoreFailed: Coordinator._restore_failed,
    Beat: Coordinator._beat,
    DeadlinePaused: Coordinator._deadline_paused,
    StepBegun: Coordinator._step_begun,
    StepFinished: Coordinator._step_finished,
    StepFailed: Coordinator._step_failed,
    TrainFailed: Coordinator._train_failed,
    StepsDone: Coordinator._steps_done,
    TrainReturned: Coordinator._train_returned,
    ManifestStored: Coordinator._manifest_stored,
    UploadMissed: Coordinator._upload_missed,
    HeadMoved: Coordinator._head_moved,
}
