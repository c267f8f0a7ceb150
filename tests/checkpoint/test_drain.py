"""The end of a run: the newest step that all ranks have is committed, from memory or the store."""

from typing import Any

import pytest

from resilient_sdk.checkpoint import (
    Head,
    commit_from_memory,
    move_head,
    read_head,
    read_state,
    store_snapshot,
    stored_steps,
)
from resilient_sdk.errors import StaleGeneration, StoreUnavailable
from resilient_sdk.store import FileStore, MemoryStore, Store
from resilient_sdk.store.wrappers import FaultyStore


def drain(run: Any, store: Store, generation: int = 1) -> Head | None:
    return commit_from_memory(store, run.root, run.run, run.world_size, run.key, generation)


def captured(run: Any, rank: int, *steps: int, generation: int = 1) -> Any:
    file = run.snapshots(rank)
    for step in steps:
        run.capture(file, rank, step, generation)
    return file


def committed(run: Any, store: Store, step: int, generation: int = 1) -> None:
    head = read_head(store)
    assert head is not None
    assert head.step == step
    for ref in head.refs:
        assert run.is_it(read_state(store, ref, run.key), ref.rank, step, generation)


def test_the_newest_step_that_all_have_in_memory(run: Any) -> None:
    store = MemoryStore()
    captured(run, 0, 4, 5)
    captured(run, 1, 3, 4)
    head = drain(run, store, generation=6)
    assert head == read_head(store)
    assert head is not None
    assert head.generation == 6
    committed(run, store, 4)
    assert drain(run, store, generation=6) == head


def test_stored_and_in_memory_are_combined(run: Any) -> None:
    store = MemoryStore()
    store_snapshot(store, captured(run, 0, 5), 5, run.identity(0), None)
    captured(run, 0, 6, 7)
    captured(run, 1, 4, 5)
    drain(run, store)
    committed(run, store, 5)
    assert [ref.step for ref in stored_steps(store, 1, run.key)] == [5]


def test_a_rank_of_another_node_that_has_all_stored(run: Any) -> None:
    store = MemoryStore()
    elsewhere = captured(run, 1, 5)
    store_snapshot(store, elsewhere, 5, run.identity(1), None)
    elsewhere.remove()
    captured(run, 0, 5)
    drain(run, store)
    committed(run, store, 5)
    assert not (run.root / "rank-00001").exists(), "looking makes no directories"


def test_nothing_in_common(run: Any) -> None:
    store = MemoryStore()
    captured(run, 0, 5)
    assert drain(run, store) is None
    captured(run, 1, 6)
    assert drain(run, store) is None
    assert list(store.keys("head")) == []


def test_a_damaged_snapshot_does_not_count(run: Any) -> None:
    store = MemoryStore()
    captured(run, 0, 4, 5)
    captured(run, 1, 4, 5)
    with (run.root / "rank-00001" / "slot-1").open("r+b") as slot:
        slot.seek(4096)
        slot.write(b"damage")
    drain(run, store)
    committed(run, store, 4)


def test_the_head_stays_where_memory_is_not_newer(run: Any) -> None:
    store = MemoryStore()
    files = [captured(run, rank, 5) for rank in range(2)]
    refs = tuple(store_snapshot(store, file, 5, run.identity(rank), None) for rank, file in enumerate(files))
    move_head(store, None, Head(5, 1, 2, refs))
    before = set(store.keys())
    assert drain(run, store, generation=2) == Head(5, 1, 2, refs)
    for rank in range(2):
        files[rank].remove()
        captured(run, rank, 3, 4)
    assert drain(run, store, generation=2) == Head(5, 1, 2, refs)
    assert set(store.keys()) == before


def test_one_step_of_two_generations_is_not_one_step(run: Any) -> None:
    store = MemoryStore()
    store_snapshot(store, captured(run, 0, 4, 5), 5, run.identity(0), None)  # then step 5 is rolled back
    run.snapshots(0).forget_after(4)
    captured(run, 1, 4)
    captured(run, 1, 5, generation=2)  # and only rank 1 finishes it again
    drain(run, store, generation=3)
    committed(run, store, 4)
    captured(run, 0, 5, generation=2)
    drain(run, store, generation=3)
    committed(run, store, 5, generation=2)


def test_a_later_generation_has_committed(run: Any) -> None:
    store = MemoryStore()
    for rank in range(2):
        captured(run, rank, 5)
    drain(run, store, generation=4)
    for rank in range(2):
        captured(run, rank, 6)
    with pytest.raises(StaleGeneration):
        drain(run, store, generation=3)


def test_a_drain_that_dies_after_any_call_is_completed_by_the_next(run: Any, tmp_path: Any) -> None:
    for rank in range(2):
        captured(run, rank, 4, 5)
    calls = 0
    while True:
        store = FileStore(tmp_path / str(calls))
        try:
            drain(run, FaultyStore(store, calls=calls))
        except StoreUnavailable:
            calls += 1
        else:
            break
        assert read_head(store) is None or committed(run, store, 5) is None
        drain(run, store)
        committed(run, store, 5)
    assert calls > 15
