"""The coordinator: facts in, commands out. No clock, socket, thread or tensor; time comes in as data.

After dask's worker_state_machine: state is mutated only in `handle` and `tick`, which return orders and
execute none. The rules live beside this, one module for each question:

    processes    who is alive             recovery    where does everybody stand
    membership   who owns which rank      steps       is there progress
    blame        whose fault is it        uploads     what is committed
"""

from collections.abc import Callable
from typing import Any

from resilient_sdk.coordination import blame, membership, processes, recovery, steps, uploads
from resilient_sdk.coordination.commands import Command
from resilient_sdk.coordination.stall import find_stall, wake
from resilient_sdk.coordination.state import Phase, Role, RunState
from resilient_sdk.coordination.turn import FORMED, Turn
from resilient_sdk.errors import InvalidTransition
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    DeadlinePaused,
    Fact,
    HeadMoved,
    ManifestStored,
    Restored,
    RestoreFailed,
    RunResumed,
    RunStarted,
    StandbyReady,
    StartFailed,
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


class Coordinator:
    """One run's decisions.

    Args:
        state: where to go on from; None: a run that has not started.
    """

    def __init__(self, state: RunState | None = None) -> None:
        self.state = state if state is not None else RunState()

    def handle(self, fact: Fact, now: float) -> list[Command]:
        """Takes one fact and returns what is to be done, in order.

        A fact of an older generation, or of a worker that no longer owns its rank, changes nothing.

        Raises:
            InvalidTransition: a fact that nobody may report (a defect).
        """
        handler = _HANDLERS.get(type(fact))
        if handler is None:
            raise InvalidTransition(
                f"{type(fact).__name__} is not for the coordinator", state=self.state.phase
            )
        wake(self.state, now)
        turn = Turn(self.state, now)
        if self.state.phase != Phase.ENDED or isinstance(fact, RunResumed):
            handler(turn, fact)
            membership.pay_when_calm(turn)
        return turn.out

    def tick(self, now: float) -> list[Command]:
        """Time has passed: verdicts and deadlines that are due."""
        wake(self.state, now)
        turn = Turn(self.state, now)
        if self.state.pending:
            if self.state.phase in FORMED and now >= self.state.verdict_at:
                blame.judge(turn)
        elif stall := find_stall(self.state, now):
            blame.act_on_stall(turn, stall)
        return turn.out


# ---- the run ----


def _run_started(turn: Turn, fact: RunStarted) -> None:
    s = turn.state
    if s.workers:
        return
    s.nproc, s.standbys, s.max_restarts = fact.nproc, fact.standbys, fact.max_restarts
    s.stall_floor_s, s.startup_s = fact.stall_floor_s, fact.startup_s
    s.owners = [None] * fact.nproc
    s.history = [[] for _ in range(fact.nproc)]
    turn.enter(Phase.FORMING)
    _populate(turn)


def _run_resumed(turn: Turn, _: RunResumed) -> None:
    s = turn.state
    for worker in s.workers:
        worker.role = Role.GONE
    s.owners = [None] * s.nproc
    s.restarts = s.owed = s.deaths_in_row = s.retries_in_row = 0
    s.outcome = s.message = ""
    s.error, s.pending, s.first_failures = {}, [], []
    s.broken_at, s.recovery_phases, s.recovery_lost = 0.0, {}, 0
    # Memory may be gone with the workers; what the head names is what the run has.
    s.best = max(s.head, 0)
    turn.enter(Phase.FORMING)
    _populate(turn)


def _populate(turn: Turn) -> None:
    for _ in range(turn.state.nproc + turn.state.standbys):
        membership.start_worker(turn)


def _start_failed(turn: Turn, fact: StartFailed) -> None:
    turn.end("failed", fact.reason, {"kind": "StartFailed"})


def _stop_requested(turn: Turn, fact: StopRequested) -> None:
    turn.end("stopped", fact.reason)


_HANDLERS: dict[type[Fact], Callable[[Turn, Any], None]] = {
    RunStarted: _run_started,
    RunResumed: _run_resumed,
    StopRequested: _stop_requested,
    StartFailed: _start_failed,
    AgentJoined: processes.agent_joined,
    WorkerStarted: processes.worker_started,
    WorkerExited: processes.worker_exited,
    StandbyReady: processes.standby_ready,
    TrainReturned: processes.train_returned,
    StepsOffered: recovery.steps_offered,
    Restored: recovery.restored,
    RestoreFailed: recovery.restore_failed,
    Beat: steps.beat,
    DeadlinePaused: steps.deadline_paused,
    StepBegun: steps.step_begun,
    StepFinished: steps.step_finished,
    StepsDone: steps.steps_done,
    StepFailed: blame.step_failed,
    TrainFailed: blame.train_failed,
    ManifestStored: uploads.manifest_stored,
    UploadMissed: uploads.upload_missed,
    HeadMoved: uploads.head_moved,
}
