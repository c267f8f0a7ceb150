"""Frames between an agent, its zygote and its workers."""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from resilient_sdk.rpc.frames import MAX_FRAME, Channel, ChannelClosed, channel_pair

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = channel_pair()
    theirs.settimeout(5)
    yield ours, theirs
    ours.close()
    theirs.close()


def frame(record: object) -> bytes:
    body = json.dumps(record).encode()
    return struct.pack("!I", len(body)) + body


def test_records_arrive_whole_and_in_order(ends: Ends) -> None:
    ours, theirs = ends
    other = Channel(theirs)
    for number in range(3):
        other.send({"number": number, "text": "ä" * 1000})
    assert [ours.receive(timeout_s=1) for _ in range(3)] == [
        {"number": number, "text": "ä" * 1000} for number in range(3)
    ]


def test_a_record_larger_than_the_sockets_buffer_arrives_whole(ends: Ends) -> None:
    ours, theirs = ends
    sent = {"text": "x" * (4 << 20)}
    sender = threading.Thread(target=Channel(theirs).send, args=(sent,))
    sender.start()
    assert ours.receive(timeout_s=5) == sent
    sender.join()


def test_a_partial_frame_is_waited_for_and_not_lost(ends: Ends) -> None:
    ours, theirs = ends
    whole = frame({"a": 1})
    for cut in range(1, len(whole)):
        theirs.sendall(whole[:cut])
        assert ours.receive(timeout_s=0.001) is None
        theirs.sendall(whole[cut:])
        assert ours.receive(timeout_s=1) == {"a": 1}


def test_what_has_arrived_is_taken_at_once(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(frame({"a": 1}) + frame({"b": 2}) + frame({"c": 3})[:5])
    assert ours.receive_ready() == [{"a": 1}, {"b": 2}]
    theirs.sendall(frame({"c": 3})[5:])
    assert ours.receive_ready() == [{"c": 3}]


def test_the_end_of_the_stream_comes_after_what_was_said(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(frame({"last": "words"}) + frame({"half": 1})[:6])
    theirs.close()
    assert ours.receive(timeout_s=1) == {"last": "words"}
    with pytest.raises(ChannelClosed, match="end of stream"):
        ours.receive(timeout_s=1)


def test_sending_to_nobody_is_one_kind_of_error(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send({"a": 1})


@pytest.mark.parametrize("length", [MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_length_beyond_the_limit_breaks_the_stream_and_allocates_nothing(ends: Ends, length: int) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack("!I", length))
    with pytest.raises(ChannelClosed, match=f"a frame of {length} bytes"):
        ours.receive(timeout_s=1)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1, 2]", b"3"])
def test_a_frame_that_is_no_record_breaks_the_stream(ends: Ends, body: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack("!I", len(body)) + body)
    with pytest.raises(ChannelClosed, match="not a record"):
        ours.receive(timeout_s=1)


def test_descriptors_come_with_the_record_they_were_sent_with(ends: Ends) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    other = Channel(theirs)
    other.send({"worker": 7}, (reading, writing))
    os.close(reading)
    os.close(writing)
    record, received = ours.receive_with_fds(2)
    assert record == {"worker": 7}
    os.write(received[1], b"through")
    assert os.read(received[0], 16) == b"through"
    for descriptor in received:
        os.close(descriptor)


def test_two_orders_that_arrive_together_keep_their_own_descriptors(ends: Ends) -> None:
    """The zygote is slow to start, and its agent has ordered several workers by then."""
    ours, theirs = ends
    other = Channel(theirs)
    pipes = [os.pipe() for _ in range(3)]
    for number, pipe in enumerate(pipes):
        other.send({"worker": number}, pipe)
    for number in range(3):
        record, received = ours.receive_with_fds(2)
        assert record == {"worker": number}
        assert len(received) == 2
        os.write(received[1], str(number).encode())
        assert os.read(pipes[number][0], 16) == str(number).encode()
        for descriptor in (*received, *pipes[number]):
            os.close(descriptor)


def test_no_more_orders(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive_with_fds(2)


def test_many_threads_may_send(ends: Ends) -> None:
    ours, theirs = ends
    other = Channel(theirs)

    def send(number: int) -> None:
        for i in range(50):
            other.send({"from": number, "n": i, "pad": "x" * 500})

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    got = [ours.receive(timeout_s=5) for _ in range(200)]
    for sender in senders:
        sender.join()
    for n in range(4):
        assert [record["n"] for record in got if record and record["from"] == n] == list(range(50))
