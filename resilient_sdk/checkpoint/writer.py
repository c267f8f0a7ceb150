"""From a snapshot to the store: chunks, then the manifest that names them. See FORMAT.md for the order."""

from dataclasses import dataclass, field

from resilient_sdk.checkpoint.layout import Piece, Table, chunk_hash
from resilient_sdk.checkpoint.manifest import Manifest, ManifestRef, chunk_prefix, encode, ref_of
from resilient_sdk.checkpoint.snapshot import Pinned, SnapshotFile
from resilient_sdk.errors import Corrupt, NothingToRestore
from resilient_sdk.faults import NO_FAULTS, FaultPlan
from resilient_sdk.ids import Rank, RunId, Step
from resilient_sdk.store.base import Store


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes: the run, the rank in it, and the run's key, with which manifests are signed."""

    run: RunId
    rank: Rank
    world_size: int
    key: bytes = field(repr=False)


def store_snapshot(
    store: Store,
    snapshots: SnapshotFile,
    step: Step,
    identity: Identity,
    previous: Manifest | None,
    faults: FaultPlan = NO_FAULTS,
) -> ManifestRef:
    """Stores the snapshot of `step`, pinned meanwhile. May be repeated after any failure.

    `previous` is the manifest that this very writer stored last, or None: only its chunks are not written
    again. A chunk that merely exists is: between the look and the manifest its owner might delete it.

    Raises NothingToRestore where the step is not in memory (any more), Corrupt where memory was damaged since
    the capture, StoreError. Faults strike at "upload", half-way through the chunks, and at "manifest".
    """
    pinned = snapshots.pin(step)
    try:
        return store_pinned(store, snapshots, pinned, identity, previous, faults)[0]
    finally:
        snapshots.release(pinned)


def store_pinned(
    store: Store,
    snapshots: SnapshotFile,
    pinned: Pinned,
    identity: Identity,
    previous: Manifest | None,
    faults: FaultPlan = NO_FAULTS,
) -> tuple[ManifestRef, Manifest]:
    """Does the work of `store_snapshot` for a snapshot that is pinned already."""
    table = pinned.table
    missing = new_chunks(table, previous)
    middle = (len(missing) + 1) // 2
    for number in range(len(missing) + 1):
        if number == middle:
            faults.point("upload", rank=identity.rank, step=table.step)
        if number < len(missing):
            _require_valid(snapshots, pinned)
            _put_chunk(store, pinned, identity, missing[number])
    _require_valid(snapshots, pinned)
    manifest = Manifest(identity.run, identity.rank, identity.world_size, table)
    encoded = encode(manifest, identity.key)
    ref = ref_of(manifest, encoded)
    store.put(ref.key, encoded)
    faults.point("manifest", rank=identity.rank, step=table.step)
    return ref, manifest


def new_chunks(table: Table, previous: Manifest | None) -> list[Piece]:
    """Returns the chunks that `previous` does not name, each hash once."""
    known = {piece.hash for piece in previous.chunks} if previous else set()
    return list({piece.hash: piece for piece in table.pieces() if piece.hash not in known}.values())


def _put_chunk(store: Store, pinned: Pinned, identity: Identity, piece: Piece) -> None:
    data = pinned.stream[piece.offset : piece.offset + piece.nbytes]
    # Memory that went bad since the capture must not reach the store under a good name.
    if chunk_hash(data) != piece.hash:
        raise Corrupt(
            f"the snapshot of step {pinned.table.step} was damaged in memory",
            rank=identity.rank,
            step=pinned.table.step,
            chunk=piece.offset // pinned.table.chunk_nbytes,
        )
    store.put(chunk_prefix(identity.rank) + piece.hash, data)


def _require_valid(snapshots: SnapshotFile, pinned: Pinned) -> None:
    # The bytes are whole still, but after a rollback they are a step that never was.
    if not snapshots.holds(pinned):
        raise NothingToRestore(f"step {pinned.table.step} was rolled back", step=pinned.table.step)
