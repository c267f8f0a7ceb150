"""Workers as their agent sees them: started, ready, gone, and found again after a connection broke."""

from resilient_sdk.coordination.blame import describe, ranks_lost
from resilient_sdk.coordination.commands import KillWorker, Leave, StandBy, StartWorker
from resilient_sdk.coordination.membership import fill, join_order, owe_worker, settle_fresh
from resilient_sdk.coordination.recovery import repeat_go, repeat_restore
from resilient_sdk.coordination.state import Phase, Role, WorkerState
from resilient_sdk.coordination.steps import repeat_finish
from resilient_sdk.coordination.turn import FORMED, Turn
from resilient_sdk.coordination.uploads import repeat_aim
from resilient_sdk.events import AgentJoined, StandbyReady, TrainReturned, WorkerExited, WorkerStarted


def worker_started(turn: Turn, fact: WorkerStarted) -> None:
    s = turn.state
    worker = turn.worker(fact.worker)
    if worker.role == Role.GONE:
        turn.order(
            KillWorker(worker.worker)
        )  # it was given up: it must not live beside the one that replaced it
    if worker.role != Role.ORDERED:
        return
    worker.role, worker.pid = Role.FRESH, fact.pid
    worker.beat_at = s.progress_at = turn.now
    if s.phase == Phase.FORMING:
        fill(turn)
    settle_fresh(turn)


def standby_ready(turn: Turn, fact: StandbyReady) -> None:
    worker = turn.worker(fact.worker)
    worker.warm, worker.note = fact.warm or worker.warm, fact.note
    if worker.role == Role.WARMING:
        worker.role = Role.READY


def train_returned(turn: Turn, fact: TrainReturned) -> None:
    turn.worker(fact.worker).returned = True


def worker_exited(turn: Turn, fact: WorkerExited) -> None:
    _gone(turn, [fact])


def _gone(turn: Turn, exits: list[WorkerExited]) -> None:
    """Takes workers out that are gone, all at once: none of them is given another's rank."""
    s = turn.state
    left = [(turn.worker(fact.worker), fact) for fact in exits if turn.worker(fact.worker).role != Role.GONE]
    members = [(worker, fact) for worker, fact in left if worker.role == Role.MEMBER]
    for worker, _ in left:
        worker.role = Role.GONE
    if s.phase == Phase.FINISHING:
        _gone_after_last_step(turn, members)
        return
    dead = [(worker, fact) for worker, fact in members if not _returned_early(s.phase, worker, fact)]
    for _ in range(len(left) - len(members) + len(dead)):
        owe_worker(turn)
    if dead:
        s.broken_at = s.broken_at or turn.now
        ranks_lost(turn, dead)
    elif members:
        _end_if_all_returned(turn)
    elif left and s.phase == Phase.FORMING:
        fill(turn)


def _returned_early(phase: Phase, worker: WorkerState, fact: WorkerExited) -> bool:
    # Once its generation has broken, its rank has steps to run again, and it is lost like any other.
    return phase == Phase.STEPPING and worker.returned and fact.code == 0


def _gone_after_last_step(turn: Turn, members: list[tuple[WorkerState, WorkerExited]]) -> None:
    for worker, fact in members:
        if fact.code != 0:
            how = describe(fact)
            error = {"rank": worker.rank, "kind": how}
            turn.end("failed", f"rank {worker.rank} {how} after its last step", error)
            return
    _end_if_all_returned(turn)


def _end_if_all_returned(turn: Turn) -> None:
    s = turn.state
    if all(w.role == Role.GONE for w in s.members()):
        turn.end("finished", f"finished at step {s.best}")


# ---- a connection, again ----


def agent_joined(turn: Turn, fact: AgentJoined) -> None:
    """Those alive on the node are all there are. Orders that may have been lost are given again."""
    s = turn.state
    s.progress_at = turn.now
    for worker in s.workers:
        if worker.role == Role.ORDERED:
            turn.order(StartWorker(worker.worker))
        elif worker.role == Role.GONE and worker.worker in fact.workers:
            turn.order(KillWorker(worker.worker))  # given up before, and replaced
    for worker in s.living():
        worker.beat_at = turn.now  # nobody was heard meanwhile, so nobody was silent
    missing = [w.worker for w in s.living() if w.worker not in fact.workers]
    _gone(turn, [WorkerExited(worker, None, None, turn.now) for worker in missing])
    _repeat_orders(turn)


def _repeat_orders(turn: Turn) -> None:
    s = turn.state
    if s.phase == Phase.FINISHING:
        repeat_finish(turn)
        return
    for worker in s.living():
        _repeat_place(turn, worker)
    if s.phase == Phase.RESTORING:
        repeat_restore(turn)
    elif s.phase == Phase.STEPPING:
        repeat_go(turn)
        repeat_aim(turn)


def _repeat_place(turn: Turn, worker: WorkerState) -> None:
    phase = turn.state.phase
    if worker.role == Role.WARMING:
        turn.repeat(StandBy(worker.worker))
    elif worker.role == Role.MEMBER and worker.blamed:
        turn.repeat(KillWorker(worker.worker))
    elif worker.role == Role.MEMBER and phase in FORMED:
        turn.repeat(join_order(turn, worker))
    elif worker.role == Role.MEMBER and phase == Phase.FORMING:
        turn.repeat(Leave(worker.worker, turn.state.generation))
