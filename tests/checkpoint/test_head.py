"""The head: it moves forward only, one at a time, and damage to it is found."""

import threading

import pytest

from resilient_sdk.checkpoint import Head, ManifestRef, move_head, read_head
from resilient_sdk.checkpoint.head import decode_head, encode_head
from resilient_sdk.errors import Corrupt, HeadMoved, InvalidTransition, NewerFormat, StaleGeneration
from resilient_sdk.store import MemoryStore


def head(step: int, generation: int = 1, digest: str = "0" * 16) -> Head:
    return Head(step, generation, 2, tuple(ManifestRef(rank, step, generation, digest) for rank in range(2)))


def test_it_moves_forward() -> None:
    store = MemoryStore()
    assert read_head(store) is None
    move_head(store, None, head(1))
    move_head(store, head(1), head(2))
    move_head(store, head(2), head(2, generation=2))
    assert read_head(store) == head(2, generation=2)


def test_a_repeated_move_is_no_error() -> None:
    store = MemoryStore()
    move_head(store, None, head(1))
    move_head(store, None, head(1))


def test_it_never_moves_back() -> None:
    store = MemoryStore()
    move_head(store, None, head(5, generation=3))
    with pytest.raises(StaleGeneration):
        move_head(store, head(5, generation=3), head(6, generation=2))
    with pytest.raises(InvalidTransition):
        move_head(store, head(5, generation=3), head(4, generation=4))
    with pytest.raises(StaleGeneration):
        move_head(store, None, head(6, generation=2))
    assert read_head(store) == head(5, generation=3)


def test_an_outdated_view_is_refused_with_what_is_there() -> None:
    store = MemoryStore()
    move_head(store, None, head(1))
    move_head(store, head(1), head(2))
    with pytest.raises(HeadMoved) as caught:
        move_head(store, head(1), head(3))
    assert caught.value.evidence["found"] == head(2)


def test_a_move_in_between_is_seen() -> None:
    class Between(MemoryStore):
        def compare_and_set(self, key: str, expected: bytes | None, new: bytes) -> None:
            super().compare_and_set(key, expected, encode_head(head(2, digest="1" * 16)))
            super().compare_and_set(key, expected, new)

    with pytest.raises(HeadMoved) as caught:
        move_head(Between(), None, head(2))
    assert caught.value.evidence["found"] == head(2, digest="1" * 16)


def test_of_racing_committers_one_wins() -> None:
    store = MemoryStore()
    won: list[Head] = []
    barrier = threading.Barrier(4)

    def commit(number: int) -> None:
        barrier.wait()
        try:
            move_head(store, None, head(1, digest=f"{number:016}"))
        except HeadMoved:
            return
        won.append(head(1, digest=f"{number:016}"))

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [read_head(store)]


def test_a_head_names_every_rank_of_one_step() -> None:
    good = head(3).refs
    for refs in (good[:1], good[::-1], (good[0], head(4).refs[1]), ()):
        with pytest.raises(ValueError, match="one manifest"):
            Head(3, 1, 2, refs)


def test_every_flipped_byte_and_every_cut_is_found() -> None:
    data = encode_head(head(3))
    assert decode_head(data) == head(3)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises((Corrupt, NewerFormat)):
            decode_head(bytes(damaged))
        with pytest.raises(Corrupt):
            decode_head(data[:position])


def test_a_newer_format_is_named() -> None:
    with pytest.raises(NewerFormat, match=r"format 3, this version reads up to 1"):
        decode_head(b"resilient-head 3\nwhatever")
