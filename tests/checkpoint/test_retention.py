"""What is kept, what goes, and that nothing goes which a kept manifest names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_sdk.checkpoint import Policy, read_state, store_snapshot, stored_steps
from resilient_sdk.checkpoint.layout import Table
from resilient_sdk.checkpoint.manifest import Manifest, ManifestRef, chunk_prefix
from resilient_sdk.checkpoint.reader import read_manifest
from resilient_sdk.checkpoint.retention import Namespace, Plan, choose, plan
from resilient_sdk.errors import StoreUnavailable
from resilient_sdk.store import MemoryStore, Store
from resilient_sdk.store.wrappers import FaultyStore


def ref(step: int, generation: int = 1) -> ManifestRef:
    return ManifestRef(0, step, generation, f"{step:08x}{generation:08x}")


def manifest(step: int, chunks: frozenset[str]) -> Manifest:
    return Manifest("r", 0, 1, Table(step, 1, 4096 * len(chunks), (), 0, "", 4096, tuple(sorted(chunks))))


STEPS = st.integers(1, 12)
CHUNKS = st.frozensets(st.sampled_from("abcdefgh"), max_size=5)
MANIFESTS = st.dictionaries(
    st.builds(ref, STEPS, st.integers(1, 2)), st.one_of(CHUNKS, st.none()), max_size=12
)


@given(stored=MANIFESTS, committed=st.frozensets(STEPS, max_size=6), keep=st.integers(1, 4))
def test_nothing_that_a_kept_manifest_names_is_deleted(
    stored: dict[ManifestRef, frozenset[str] | None], committed: frozenset[int], keep: int
) -> None:
    manifests = {
        key: None if chunks is None else manifest(key.step, chunks) for key, chunks in stored.items()
    }
    kept = choose(manifests, committed, keep)
    deleted = plan(manifests, kept)
    assert set(deleted.manifests) == set(stored) - kept
    named = {chunk for key in kept for chunk in stored[key] or ()}
    assert not named & set(deleted.chunks)
    if any(stored[key] is None for key in kept):
        assert deleted.chunks == (), "who knows what it names"
    head = max(committed, default=None)
    for key in stored:
        if head is None or key.step >= head:
            assert key in kept
    if committed:
        assert {key.step for key in kept if key.step <= max(committed)} <= set(sorted(committed)[-keep:])


def test_a_plan_is_a_value() -> None:
    stored = {ref(1): manifest(1, frozenset("ab")), ref(2): manifest(2, frozenset("bc"))}
    assert plan(stored, [ref(2)]) == Plan((ref(1),), ("a",))
    with pytest.raises(ValueError, match="always kept"):
        Policy(keep=0)


def fill(run: Any, store: Store, steps: list[int]) -> None:
    file = run.snapshots(0)
    for step in steps:
        run.capture(file, 0, step)
        store_snapshot(store, file, step, run.identity(0), None)


def opened(run: Any, store: Store, keep: int = 2, budget: int | None = None) -> Namespace:
    space = Namespace(store, run.identity(0), Policy(keep, budget))
    space.open()
    return space


def steps(run: Any, store: Store) -> list[int]:
    found = stored_steps(store, 0, run.key)
    assert all(run.is_it(read_state(store, ref, run.key), 0, ref.step) for ref in found)
    return [ref.step for ref in found]


def chunks_are_those_named(run: Any, store: Store) -> bool:
    named = {
        chunk_prefix(0) + piece.hash
        for ref in stored_steps(store, 0, run.key)
        for piece in read_manifest(store, ref, run.key).chunks
    }
    return set(store.keys(chunk_prefix(0))) == named


def test_it_keeps_the_newest_committed_and_what_is_newer_than_the_head(run: Any) -> None:
    store = MemoryStore()
    fill(run, store, [1, 2, 3, 4, 5, 6])
    store.put("rank-00001/chunks/ab", b"another rank's")
    space = opened(run, store)
    space.retain([])
    assert steps(run, store) == [6, 5, 4, 3, 2, 1], "before the first commit any of them may be committed"
    space.retain([1, 3, 4])
    assert steps(run, store) == [6, 5, 4, 3]
    assert chunks_are_those_named(run, store)
    space.retain([1, 3, 4, 6])
    assert steps(run, store) == [6, 4]
    assert store.get("rank-00001/chunks/ab")


def test_at_open_chunks_that_no_manifest_names_are_swept(run: Any) -> None:
    store = MemoryStore()
    fill(run, store, [1])
    store.put(chunk_prefix(0) + "f" * 32, b"left by a killed writer")
    opened(run, store)
    assert chunks_are_those_named(run, store)
    assert steps(run, store) == [1]


def test_nothing_is_swept_with_a_wrong_key_or_beside_an_unreadable_manifest(run: Any) -> None:
    store = MemoryStore()
    fill(run, store, [1, 2])
    before = set(store.keys())
    store.put(stored_steps(store, 0, run.key)[0].key, b"resilient-manifest 9\nfrom the future")
    space = opened(run, store)
    assert set(store.keys()) == before
    space.retain([1])
    assert set(store.keys()) == before
    space.retain([1, 2])
    assert set(store.keys()) == before
    fill(run, store, [3, 4])
    space.doubt()
    space.retain([3, 4])  # the unreadable one goes by age
    space.open()
    assert steps(run, store) == [4, 3]
    assert chunks_are_those_named(run, store)


def test_a_deletion_that_fails_is_made_up_for(run: Any) -> None:
    for calls in range(3, 12):
        store = MemoryStore()
        fill(run, store, [1, 2, 3])
        faulty = FaultyStore(store, calls=10**9)
        space = opened(run, faulty, keep=1)
        faulty._calls = faulty.made + calls - 3
        try:
            space.retain([3])
        except StoreUnavailable:
            faulty._calls = 10**9
            space.retain([3])
            space.open()
        assert steps(run, store) == [3]
        assert chunks_are_those_named(run, store)


def test_the_budget(run: Any) -> None:
    store = MemoryStore()
    fill(run, store, [1, 2])
    file = run.snapshots(0)
    run.capture(file, 0, 3)
    table = file.complete()[0].table
    # Steps share a chunk of 4096 (the frozen one), and differ in the others.
    one = sum({piece.hash: piece.nbytes for piece in table.pieces()}.values())
    more = one - 4096
    assert opened(run, store, budget=one + 2 * more).make_room(table, [1, 2]) == ""
    assert steps(run, store) == [2, 1]
    assert opened(run, store, budget=one + more).make_room(table, [1, 2]) == ""
    assert steps(run, store) == [2]
    assert "budget" in opened(run, store, budget=one + more - 1).make_room(table, [1, 2])
    assert steps(run, store) == [2]
    assert chunks_are_those_named(run, store)
