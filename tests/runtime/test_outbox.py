"""Facts on their way up: none is lost, whatever becomes of the connection."""

import json
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.runtime.agent import Outbox

FIRST = {"fact": "AgentJoined"}


def take(stream: Iterator[pb.FactUp], count: int) -> list[tuple[int, Any]]:
    return [(fact.number, json.loads(fact.fact)) for fact in islice(stream, count)]


def test_a_connection_begins_with_who_joined_then_all_that_is_owed() -> None:
    outbox = Outbox()
    for number in (1, 2, 3):
        outbox.put({"n": number})
    outbox.acknowledge(1)
    assert take(outbox.stream(FIRST), 3) == [(0, FIRST), (2, {"n": 2}), (3, {"n": 3})]


def test_what_was_sent_and_not_acknowledged_is_sent_again() -> None:
    outbox = Outbox()
    outbox.put({"n": 1})
    first = outbox.stream(FIRST)
    assert take(first, 2) == [(0, FIRST), (1, {"n": 1})]
    outbox.put({"n": 2})
    assert take(outbox.stream(FIRST), 3) == [(0, FIRST), (1, {"n": 1}), (2, {"n": 2})]
    assert list(first) == []  # the older connection has ended


def test_a_fleeting_fact_is_sent_once_or_never() -> None:
    outbox = Outbox()
    outbox.put({"beat": 1}, fleeting=True)
    stream = outbox.stream(FIRST)
    assert take(stream, 1) == [(0, FIRST)]
    outbox.put({"n": 1})
    outbox.put({"beat": 2}, fleeting=True)
    assert take(stream, 2) == [(1, {"n": 1}), (0, {"beat": 2})]
    assert take(outbox.stream(FIRST), 2) == [(0, FIRST), (1, {"n": 1})]


def test_ending_a_stream_frees_who_waits_in_it() -> None:
    outbox = Outbox()
    ended = threading.Event()
    stream = outbox.stream(FIRST)
    assert take(stream, 1) == [(0, FIRST)]

    def wait() -> None:
        assert list(stream) == []
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not ended.wait(0.05)
    outbox.end_stream()
    waiting.join(5)
    assert ended.is_set()


@given(st.lists(st.sampled_from(["put", "take", "acknowledge", "break"]), max_size=60))
def test_no_fact_is_lost_over_any_number_of_connections(moves: list[str]) -> None:
    """A controller that acknowledges only what it has, in order, has every fact at the end, each in its order."""
    outbox = Outbox()
    stream = outbox.stream(FIRST)
    put = 0
    kept: list[int] = []
    seen = 0  # of the present connection, and not acknowledged

    def receive() -> None:
        nonlocal seen
        fact = next(stream)
        if fact.number:
            seen = fact.number

    def acknowledge() -> None:
        kept.extend(range(len(kept) + 1, seen + 1))
        outbox.acknowledge(len(kept))

    next(stream)
    for move in moves:
        if move == "put":
            put += 1
            outbox.put({"n": put})
        elif move == "take" and seen < put:
            receive()
        elif move == "acknowledge":
            acknowledge()
        elif move == "break":
            stream, seen = outbox.stream(FIRST), len(kept)
            next(stream)
    while seen < put:
        receive()
    acknowledge()
    assert kept == list(range(1, put + 1))
    assert take(outbox.stream(FIRST), 1) == [(0, FIRST)]
