"""Members step: life signs, progress, and the last step."""

from resilient_sdk.coordination.commands import Finish, Release
from resilient_sdk.coordination.recovery import announce_recovery
from resilient_sdk.coordination.state import Phase, Role
from resilient_sdk.coordination.turn import FORMED, Turn
from resilient_sdk.events import (
    Beat,
    DeadlinePaused,
    StepBegun,
    StepFinished,
    StepsDone,
)

DURATIONS_KEPT = 32


def beat(turn: Turn, fact: Beat) -> None:
    """Whatever the generation: it lives. Whether it waits counts only for the present group."""
    worker = turn.worker(fact.worker)
    worker.beat_at = turn.now
    if fact.generation == turn.state.generation:
        worker.waiting = fact.waiting


def deadline_paused(turn: Turn, fact: DeadlinePaused) -> None:
    worker = turn.speaker(fact, *FORMED)
    if worker is not None:
        worker.paused = fact.paused
        turn.state.progress_at = turn.now


def step_begun(turn: Turn, fact: StepBegun) -> None:
    worker = turn.speaker(fact, Phase.STEPPING)
    if worker is not None:
        # Begun steps travel beside finished ones and may be overtaken by them.
        worker.step = max(worker.step, fact.step)
        worker.beat_at = turn.state.progress_at = turn.now


def step_finished(turn: Turn, fact: StepFinished) -> None:
    s = turn.state
    worker = turn.speaker(fact, Phase.STEPPING)
    if worker is None or fact.step <= worker.finished:
        return  # sent again after a connection broke
    worker.finished, worker.step = fact.step, max(worker.step, fact.step)
    worker.warm = True
    worker.beat_at = s.progress_at = turn.now
    s.durations = [*s.durations[-(DURATIONS_KEPT - 1) :], fact.seconds]
    if worker.rank == 0:
        s.metrics = dict(fact.metrics)
    slowest = min(w.finished for w in s.members())
    if slowest > s.best:
        s.best = slowest
        s.deaths_in_row = s.retries_in_row = 0
        announce_recovery(turn, slowest)


def steps_done(turn: Turn, fact: StepsDone) -> None:
    s = turn.state
    worker = turn.speaker(fact, Phase.STEPPING)
    if worker is None or worker.place in s.done:
        return
    s.done.append(worker.place)
    s.progress_at = turn.now
    if len(s.done) == s.nproc:
        _finish(turn)


def _finish(turn: Turn) -> None:
    s = turn.state
    announce_recovery(turn, s.best)
    turn.enter(Phase.FINISHING)
    repeat_finish(turn)


def repeat_finish(turn: Turn) -> None:
    s = turn.state
    for worker in s.living():
        if worker.role == Role.MEMBER:
            turn.repeat(Finish(worker.worker, s.generation))
        else:
            turn.repeat(Release(worker.worker))
