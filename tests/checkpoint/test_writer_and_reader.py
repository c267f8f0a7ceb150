"""From memory to the store and back; damage of every kind is found; a crash at any call leaves what was
there."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient_sdk.checkpoint import (
    Head,
    Identity,
    ManifestRef,
    Policy,
    move_head,
    read_head,
    read_state,
    store_snapshot,
    stored_steps,
)
from resilient_sdk.checkpoint.manifest import chunk_prefix
from resilient_sdk.checkpoint.reader import read_manifest
from resilient_sdk.checkpoint.retention import Namespace
from resilient_sdk.checkpoint.writer import store_pinned
from resilient_sdk.errors import Corrupt, NotFound, NothingToRestore, StoreUnavailable
from resilient_sdk.faults import Fault, FaultPlan
from resilient_sdk.store import FileStore, MemoryStore, Store
from resilient_sdk.store.wrappers import FaultyStore, WrappedStore


class Recorder(WrappedStore):
    """Remembers what was put, in order."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.puts: list[str] = []

    def put(self, key: str, value: Any) -> None:
        self.puts.append(key)
        super().put(key, value)


def stored(run: Any, store: Store, step: int, rank: int = 0, previous: Any = None) -> ManifestRef:
    file = run.snapshots(rank)
    run.capture(file, rank, step)
    return store_snapshot(store, file, step, run.identity(rank), previous)


def test_round_trip_and_order(run: Any) -> None:
    store = Recorder(MemoryStore())
    ref = stored(run, store, 5, rank=1)
    assert (ref.rank, ref.step, ref.generation) == (1, 5, 1)
    assert run.is_it(read_state(store, ref, run.key), 1, 5)
    assert store.puts[-1] == ref.key
    assert all(key.startswith("rank-00001/chunks/") for key in store.puts[:-1])
    assert len(set(store.puts)) == len(store.puts) == 5, "two equal chunks of the frozen array are put once"
    assert not read_state(store, ref, run.key).arrays["bias"].flags.writeable


def test_repeating_it_changes_nothing(run: Any) -> None:
    store = MemoryStore()
    ref = stored(run, store, 5)
    before = {key: store.get(key) for key in store.keys("")}
    assert store_snapshot(store, run.snapshots(0), 5, run.identity(0), None) == ref
    assert {key: store.get(key) for key in store.keys("")} == before


def test_only_chunks_of_the_own_previous_manifest_are_not_written_again(run: Any) -> None:
    store = Recorder(MemoryStore())
    first = stored(run, store, 1)
    frozen = store.puts[0]
    store.puts.clear()
    stored(run, store, 2)
    assert frozen in store.puts, "it exists, which is no reason: its owner may be about to delete it"
    store.puts.clear()
    stored(run, store, 3, previous=read_manifest(store, first, run.key))
    assert frozen not in store.puts
    assert len(store.puts) == 4


def test_a_step_that_is_not_here(run: Any) -> None:
    with pytest.raises(NothingToRestore):
        store_snapshot(MemoryStore(), run.snapshots(0), 1, run.identity(0), None)


def test_a_rollback_stops_the_upload_and_the_pin_is_given_back(run: Any) -> None:
    file = run.snapshots(0)

    class RollsBack(MemoryStore):
        def put(self, key: str, value: Any) -> None:
            super().put(key, value)
            file.forget_after(0)

    store = RollsBack()
    run.capture(file, 0, 1)
    with pytest.raises(NothingToRestore, match="rolled back"):
        store_snapshot(store, file, 1, run.identity(0), None)
    assert stored_steps(store, 0, run.key) == ()
    run.capture(file, 0, 1)
    run.capture(file, 0, 2)
    file.release(file.pin(2))


def test_memory_damaged_since_the_capture_never_gets_a_good_name(run: Any) -> None:
    file = run.snapshots(0)
    run.capture(file, 0, 1)
    with (run.root / "rank-00000" / "slot-0").open("r+b") as slot:
        slot.seek(4096 + 9_000)
        slot.write(bytes(4))
    with pytest.raises(Corrupt) as caught:
        store_snapshot(MemoryStore(), file, 1, run.identity(0), None)
    assert caught.value.evidence["chunk"] == 2


def damage(store: Store, key: str, kind: str) -> None:
    value = store.get(key)
    if kind == "missing":
        store.delete(key)
    elif kind == "cut":
        store.put(key, value[:-1])
    elif kind == "emptied":
        store.put(key, b"")
    else:
        store.put(key, value[:10] + bytes([value[10] ^ 4]) + value[11:])


@pytest.mark.parametrize("kind", ["missing", "cut", "emptied", "flipped"])
def test_a_damaged_chunk_is_named(run: Any, tmp_path: Path, kind: str) -> None:
    store = FileStore(tmp_path)
    ref = stored(run, store, 5, rank=1)
    pieces = list(read_manifest(store, ref, run.key).chunks)
    for number, piece in list(enumerate(pieces))[1:]:
        good = store.get(chunk_prefix(1) + piece.hash)
        damage(store, chunk_prefix(1) + piece.hash, kind)
        with pytest.raises(Corrupt) as caught:
            read_state(store, ref, run.key)
        evidence = caught.value.evidence
        assert (evidence["rank"], evidence["step"]) == (1, 5)
        assert pieces[evidence["chunk"]].hash == piece.hash, number
        store.put(chunk_prefix(1) + piece.hash, good)
    assert run.is_it(read_state(store, ref, run.key), 1, 5)


def test_a_damaged_manifest(run: Any) -> None:
    for kind, error in (("missing", NotFound), ("cut", Corrupt), ("emptied", Corrupt), ("flipped", Corrupt)):
        store = MemoryStore()
        ref = stored(run, store, 5)
        damage(store, ref.key, kind)
        with pytest.raises(error):
            read_state(store, ref, run.key)
        assert stored_steps(store, 0, run.key) == ()


def test_another_manifest_under_the_key_is_refused_though_it_is_signed(run: Any) -> None:
    store = MemoryStore()
    old, new = stored(run, store, 1), stored(run, store, 2)
    store.put(new.key, store.get(old.key))
    with pytest.raises(Corrupt, match="another manifest"):
        read_state(store, new, run.key)


def test_forged_scalars_are_refused_also_where_the_chunk_hash_is_right(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A collision of xxh3, simulated: every chunk "matches".
    store = MemoryStore()
    ref = stored(run, store, 1)
    last = list(read_manifest(store, ref, run.key).chunks)[-1]
    value = store.get(chunk_prefix(0) + last.hash)
    store.put(chunk_prefix(0) + last.hash, value[:-6] + b"forged")
    hashes = iter([piece.hash for piece in read_manifest(store, ref, run.key).chunks])
    monkeypatch.setattr("resilient_sdk.checkpoint.reader.chunk_hash", lambda _: next(hashes))
    with pytest.raises(Corrupt, match="scalars"):
        read_state(store, ref, run.key)


def test_stored_steps_newest_first(run: Any) -> None:
    store = MemoryStore()
    for step in (3, 12, 7):
        stored(run, store, step)
    store.put("rank-00000/manifests/strange", b"")
    assert [ref.step for ref in stored_steps(store, 0, run.key)] == [12, 7, 3]
    assert stored_steps(store, 1, run.key) == ()
    assert stored_steps(store, 0, b"the key of another run!") == ()


def commit(run: Any, store: Store, step: int, files: list[Any]) -> None:
    """One whole step as the ranks and the committer do it: upload, head, retention."""
    spaces = [Namespace(store, run.identity(rank), Policy(keep=1)) for rank in range(2)]
    refs = []
    for rank, space in enumerate(spaces):
        space.open()
        pinned = files[rank].pin(step)
        try:
            ref, manifest = store_pinned(store, files[rank], pinned, run.identity(rank), None)
        finally:
            files[rank].release(pinned)
        space.add(ref, manifest)
        refs.append(ref)
    head = read_head(store)
    move_head(store, head, Head(step, 1, 2, tuple(refs)))
    for space in spaces:
        space.retain({step} | ({head.step} if head else set()))


def named(run: Any, store: Store) -> set[str]:
    head = read_head(store)
    assert head is not None
    manifests = [read_manifest(store, ref, run.key) for ref in head.refs]
    return {chunk_prefix(one.rank) + piece.hash for one in manifests for piece in one.chunks}


@pytest.mark.parametrize("on_files", [False, True])
def test_a_crash_after_any_store_call_leaves_a_readable_head_and_the_next_run_completes(
    run: Any, tmp_path: Path, on_files: bool
) -> None:
    crashes = 0
    while True:
        inner: Store = FileStore(tmp_path / str(crashes)) if on_files else MemoryStore()
        files = [run.snapshots(rank) for rank in range(2)]
        for rank, file in enumerate(files):
            run.capture(file, rank, 1)
            run.capture(file, rank, 2)
        commit(run, inner, 1, files)
        faulty = FaultyStore(inner, calls=crashes)
        try:
            commit(run, faulty, 2, files)
        except StoreUnavailable:
            crashes += 1
        else:
            break
        committed = read_head(inner)
        assert committed is not None
        assert committed.step in (1, 2)
        for ref in committed.refs:
            assert run.is_it(read_state(inner, ref, run.key), ref.rank, committed.step)
        for rank in range(2):  # whatever is listed can be read
            for ref in stored_steps(inner, rank, run.key):
                assert run.is_it(read_state(inner, ref, run.key), rank, ref.step)
        for rank, file in enumerate(files):
            run.capture(file, rank, 3)
        commit(run, inner, 3, files)
        assert [ref.step for rank in range(2) for ref in stored_steps(inner, rank, run.key)] == [3, 3]
        assert {key for key in inner.keys("rank-") if "/chunks/" in key} == named(run, inner), (
            "no garbage is left"
        )
        for file in files:
            file.remove()
    assert crashes > 25, "a crash after every call was tried"


KILLED = """
import sys
from pathlib import Path
from resilient_sdk.checkpoint import Identity, SnapshotFile, store_snapshot
from resilient_sdk.faults import Fault, FaultPlan
from resilient_sdk.store import FileStore
place, point = sys.argv[1:]
store_snapshot(FileStore(Path(place, "store")), SnapshotFile(Path(place, "rank-00000")), 2,
               Identity("run-1", 0, 2, b"the key of run 1, secret"), None, FaultPlan((Fault(point, rank=0),)))
"""


@pytest.mark.parametrize(("point", "steps"), [("upload", [1]), ("manifest", [2, 1])])
def test_sigkill_at_the_fault_points(run: Any, point: str, steps: list[int]) -> None:
    store = FileStore(run.root / "store")
    stored(run, store, 1)
    before = len(list(store.keys()))
    run.capture(run.snapshots(0), 0, 2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run.root), point], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [ref.step for ref in stored_steps(store, 0, run.key)] == steps
    assert len(list(store.keys())) > before, "it was struck half-way, not at the start"
    for ref in stored_steps(store, 0, run.key):
        assert run.is_it(read_state(store, ref, run.key), 0, ref.step)


def test_fault_points_are_met_once_whatever_there_is_to_store(run: Any) -> None:
    met: list[str] = []

    class Plan(FaultPlan):
        def point(self, name: str, *, rank: int | None, step: int = 0) -> None:
            assert (rank, step) == (0, 1)
            met.append(name)

    store = MemoryStore()
    previous = read_manifest(store, stored(run, store, 1), run.key)
    file = run.snapshots(0)
    for known in (None, previous):
        store_snapshot(store, file, 1, run.identity(0), known, Plan())
        assert met == ["upload", "manifest"]
        met.clear()


def test_an_identity_does_not_print_its_key() -> None:
    assert "secret" not in repr(Identity("run-1", 0, 2, b"secret"))
    assert Fault("upload").rank is None
