"""Who owns which rank: vacancies, who fills them, and the generation that comes of it."""

from resilient_sdk.coordination.commands import Join, Leave, Release, StandBy, StartWorker
from resilient_sdk.coordination.state import Phase, Role, WorkerState
from resilient_sdk.coordination.turn import Turn
from resilient_sdk.events import GenerationBroken, StandbyPromoted


def start_worker(turn: Turn) -> None:
    worker = WorkerState(len(turn.state.workers))
    turn.state.workers.append(worker)
    turn.order(StartWorker(worker.worker))


def owe_worker(turn: Turn) -> None:
    """Owes a new standby for a worker that is gone, as long as restarts are left."""
    s = turn.state
    if s.restarts < s.max_restarts:
        s.restarts += 1
        s.owed += 1


def pay_owed(turn: Turn, count: int) -> None:
    for _ in range(min(count, turn.state.owed)):
        turn.state.owed -= 1
        start_worker(turn)


def pay_when_calm(turn: Turn) -> None:
    """Orders what is owed, but not during a recovery: warming up would take the processors from those who
    recover."""
    if turn.state.is_calm():
        pay_owed(turn, turn.state.owed)


def break_generation(turn: Turn, cause: str) -> None:
    """Takes everybody out of the present generation, and forms the next one if it can be whole."""
    s = turn.state
    turn.announce(GenerationBroken(s.generation, cause))
    for worker in s.members():
        if worker.role == Role.GONE:
            # It returned from train() early; its rank still has steps to run.
            vacate(turn, worker)
            owe_worker(turn)
        else:
            turn.order(Leave(worker.worker, s.generation))
    s.broken_at = s.broken_at or turn.now
    s.pending = []
    turn.enter(Phase.FORMING)
    fill(turn)


def vacate(turn: Turn, worker: WorkerState) -> None:
    turn.state.owners[worker.place] = None


def fill(turn: Turn) -> None:
    """Gives every vacant rank an owner, all at once or not at all: a group forms only when it is whole."""
    s = turn.state
    vacancies, candidates = s.vacancies(), s.candidates()
    pay_owed(turn, len(vacancies) - len(candidates) - _coming(turn))
    if len(candidates) >= len(vacancies):
        _form(turn, list(zip(vacancies, candidates, strict=False)))
    elif len(candidates) + _coming(turn) < len(vacancies):
        names = ", ".join(str(rank) for rank in vacancies)
        turn.end("no_standby", f"no standby is left for rank {names}")


def _coming(turn: Turn) -> int:
    return sum(w.role == Role.ORDERED for w in turn.state.workers)


def _form(turn: Turn, promotions: list[tuple[int, WorkerState]]) -> None:
    s = turn.state
    s.generation += 1
    for rank, worker in promotions:
        if s.generation > 1:
            turn.announce(StandbyPromoted(s.generation, rank, worker.worker, worker.warm))
        worker.role, worker.rank, worker.acting = Role.MEMBER, rank, s.generation
        s.owners[rank] = worker.worker
        s.history[rank].append(worker.worker)
    s.offers, s.restored, s.done, s.stored, s.pending = {}, [], [], {}, []
    s.restores, s.target = s.has_trained(), -1
    turn.enter(Phase.JOINING)
    for worker in s.members():
        # What it waited in is over, and whoever pauses has the time of a start to come back.
        worker.waiting = worker.paused = False
        turn.order(join_order(turn, worker))
    settle_fresh(turn)


def join_order(turn: Turn, worker: WorkerState) -> Join:
    s = turn.state
    return Join(worker.worker, s.generation, worker.place, s.nproc, s.restores)


def settle_fresh(turn: Turn) -> None:
    """Tells workers that were just started and that no rank waits for what they are for."""
    s = turn.state
    for worker in s.workers:
        if worker.role != Role.FRESH or s.phase == Phase.FORMING:
            continue
        if s.phase in (Phase.FINISHING, Phase.ENDED):
            turn.order(Release(worker.worker))
        else:
            worker.role = Role.WARMING
            turn.order(StandBy(worker.worker))
