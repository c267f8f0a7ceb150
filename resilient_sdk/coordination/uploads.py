"""Which step goes to the store, and when it is committed. All members upload the same, or none is whole."""

from resilient_sdk.coordination.commands import MoveHead, NoteHead, StoreSnapshot
from resilient_sdk.coordination.state import Phase
from resilient_sdk.coordination.turn import Turn
from resilient_sdk.events import HeadMoved, ManifestStored, UploadMissed


def aim(turn: Turn, step: int) -> None:
    """Names the step that every member uploads next."""
    s = turn.state
    s.target, s.stored = step, {}
    for worker in s.members():
        turn.order(StoreSnapshot(worker.worker, s.generation, step))


def aim_next(turn: Turn) -> None:
    """Passes over what the store was too slow for, to the newest step begun: every member has or gets it."""
    s = turn.state
    newest = max(max(w.step, w.finished) for w in s.members())
    target = max(s.target + 1, newest)
    if s.phase == Phase.FINISHING and target > s.best:
        return  # no step comes after the last
    s.missed += target - s.target - 1
    aim(turn, target)


def repeat_aim(turn: Turn) -> None:
    """The order may have been lost with a controller: those whose manifest is missing get it again."""
    s = turn.state
    for worker in s.members():
        if str(worker.rank) not in s.stored:
            turn.repeat(StoreSnapshot(worker.worker, s.generation, s.target))


def manifest_stored(turn: Turn, fact: ManifestStored) -> None:
    s = turn.state
    worker = turn.speaker(fact, Phase.STEPPING, Phase.FINISHING)
    if worker is None or worker.rank != fact.rank or fact.step != s.target:
        return
    s.stored[str(fact.rank)] = fact.key
    if len(s.stored) < s.nproc:
        return
    # After a damaged head an older step is run again; its successors may not take the head back.
    if fact.step >= s.head:
        keys = tuple(s.stored[str(rank)] for rank in range(s.nproc))
        turn.order(MoveHead(s.generation, fact.step, keys))
    aim_next(turn)


def upload_missed(turn: Turn, fact: UploadMissed) -> None:
    worker = turn.speaker(fact, Phase.STEPPING, Phase.FINISHING)
    if worker is not None and fact.step == turn.state.target:
        turn.state.missed += 1
        aim_next(turn)


def head_moved(turn: Turn, fact: HeadMoved) -> None:
    s = turn.state
    s.head = max(s.head, fact.step)
    for worker in s.members():
        turn.order(NoteHead(worker.worker, s.head))
