"""From ranks to steps: what can every member restore, does it stand there, go."""

from resilient_sdk.coordination.commands import Go, RestoreFrom
from resilient_sdk.coordination.state import Phase
from resilient_sdk.coordination.turn import Turn
from resilient_sdk.coordination.uploads import aim
from resilient_sdk.events import GenerationFormed, RecoveryFinished, Restored, RestoreFailed, StepsOffered


def steps_offered(turn: Turn, fact: StepsOffered) -> None:
    # Only while joining: an offer that is repeated later would bring back steps that were found unreadable.
    s = turn.state
    worker = turn.speaker(fact, Phase.JOINING)
    if worker is None:
        return
    s.offers[str(worker.rank)] = list(fact.steps)
    if len(s.offers) == s.nproc:
        _choose_step(turn)


def _choose_step(turn: Turn) -> None:
    s = turn.state
    common = set.intersection(*(set(steps) for steps in s.offers.values()))
    if not common and s.restores:
        turn.end("failed", f"no step is left that every rank can restore (step {s.best} was finished)",
                 {"kind": "NothingToRestore", "offers": dict(s.offers)})  # fmt: skip
        return
    s.restore_step, s.scratch = max(common, default=0), not common
    s.restored = []
    turn.enter(Phase.RESTORING)
    repeat_restore(turn)


def repeat_restore(turn: Turn) -> None:
    s = turn.state
    for worker in s.members():
        turn.repeat(RestoreFrom(worker.worker, s.generation, s.restore_step, s.scratch))


def restore_failed(turn: Turn, fact: RestoreFailed) -> None:
    s = turn.state
    worker = turn.speaker(fact, Phase.RESTORING)
    if worker is None or fact.step != s.restore_step or s.scratch:
        return
    rank = str(worker.rank)
    s.offers[rank] = [step for step in s.offers[rank] if step != fact.step]
    _choose_step(turn)


def restored(turn: Turn, fact: Restored) -> None:
    s = turn.state
    worker = turn.speaker(fact, Phase.RESTORING)
    if worker is None or fact.step != s.restore_step:
        return
    worker.step = worker.finished = fact.step
    if worker.place not in s.restored:
        s.restored.append(worker.place)
    for name, seconds in fact.phases.items():
        s.recovery_phases[name] = max(seconds, s.recovery_phases.get(name, 0.0))
    if len(s.restored) == s.nproc:
        _go(turn)


def _go(turn: Turn) -> None:
    s = turn.state
    turn.enter(Phase.STEPPING)
    lost = max(s.best - s.restore_step, 0)
    s.lost += lost
    s.recovery_lost += lost
    s.best = s.restore_step
    workers = tuple(w.worker for w in s.members())
    phases = dict(s.recovery_phases) if s.broken_at else {}
    turn.announce(GenerationFormed(s.generation, workers, s.restore_step, lost, phases))
    for worker in s.members():
        worker.begun, worker.acting = True, s.generation
    repeat_go(turn)
    aim(turn, s.restore_step + 1)


def repeat_go(turn: Turn) -> None:
    s = turn.state
    for worker in s.members():
        turn.repeat(Go(worker.worker, s.generation))


def announce_recovery(turn: Turn, step: int) -> None:
    """Every rank has finished a step again, or has nothing left to step through."""
    s = turn.state
    if s.broken_at:
        s.recoveries += 1
        seconds, phases = turn.now - s.broken_at, dict(s.recovery_phases)
        turn.announce(RecoveryFinished(s.generation, step, s.recovery_lost, seconds, phases))
    s.broken_at, s.recovery_phases, s.recovery_lost = 0.0, {}, 0
