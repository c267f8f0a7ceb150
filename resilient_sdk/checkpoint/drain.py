"""The end of a run: what is only in memory goes to the store. Knows files and a store, no processes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from resilient_sdk.checkpoint.head import Head, move_head, read_head
from resilient_sdk.checkpoint.manifest import ManifestRef, rank_name
from resilient_sdk.checkpoint.reader import stored_steps
from resilient_sdk.checkpoint.snapshot import SnapshotFile
from resilient_sdk.checkpoint.writer import Identity, store_pinned
from resilient_sdk.ids import Generation, Rank, RunId, Step
from resilient_sdk.store.base import Store

_Moment = tuple[Generation, Step]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What one rank has, by moment."""

    snapshots: SnapshotFile | None
    in_memory: frozenset[_Moment]
    stored: Mapping[_Moment, ManifestRef]

    @property
    def moments(self) -> set[_Moment]:
        return {*self.in_memory, *self.stored}


def snapshot_directory(snapshot_root: Path, rank: Rank) -> Path:
    """Returns where a rank's `SnapshotFile` lies below a run's snapshot root."""
    return snapshot_root / rank_name(rank)


def commit_from_memory(
    store: Store, snapshot_root: Path, run: RunId, world_size: int, key: bytes, generation: Generation
) -> Head | None:
    """Commits the newest step that every rank has, complete in this node's memory or stored; returns the
    head.

    Every rank's worker must be dead or gone, and its uploader closed. A step counts only where all ranks have
    it of the same generation: a step that was rolled back and run again is another one. Where that is not
    newer than the head, the head stays; None means that nothing was ever committed and nothing can be. At the
    end everything stored survives a power loss. May be repeated after any failure.

    Raises what `move_head` and `store_snapshot` raise.
    """
    with ExitStack() as stack:
        ranks = [Rank(number) for number in range(world_size)]
        holdings = {rank: _look(store, snapshot_root, rank, key, stack) for rank in ranks}
        current = read_head(store)
        moment = _newest_common(holdings, current)
        if moment is None:
            store.sync()
            return current
        refs = tuple(
            _stored_ref(store, holdings[rank], moment, Identity(run, rank, world_size, key)) for rank in ranks
        )
        head = Head(moment[1], generation, world_size, refs)
        store.sync()  # before the head, or a power loss could leave it naming what is not there
        move_head(store, current, head)
        store.sync()
        return head


def _look(store: Store, root: Path, rank: Rank, key: bytes, stack: ExitStack) -> _Holdings:
    stored = {ref.order: ref for ref in stored_steps(store, rank, key)}
    directory = snapshot_directory(root, rank)
    if not directory.is_dir():  # it ran on another node; opening would make it
        return _Holdings(None, frozenset(), stored)
    snapshots = SnapshotFile(directory)
    stack.callback(snapshots.close)
    in_memory = frozenset((snapshot.generation, snapshot.step) for snapshot in snapshots.complete())
    return _Holdings(snapshots, in_memory, stored)


def _newest_common(holdings: Mapping[Rank, _Holdings], current: Head | None) -> _Moment | None:
    common = set.intersection(*(held.moments for held in holdings.values()))
    return max((moment for moment in common if current is None or moment[1] > current.step), default=None)


def _stored_ref(store: Store, held: _Holdings, moment: _Moment, identity: Identity) -> ManifestRef:
    if moment in held.stored:
        return held.stored[moment]
    if held.snapshots is None:
        raise AssertionError("a moment that is not stored is in memory")
    generation, step = moment
    pinned = held.snapshots.pin(step, generation)
    try:
        return store_pinned(store, held.snapshots, pinned, identity, None)[0]
    finally:
        held.snapshots.release(pinned)
