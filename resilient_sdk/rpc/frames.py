"""Frames of JSON over a Unix socket: how an agent talks with the zygote and with its workers.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. The sockets are inherited socket
pairs without a name, so nobody but the two processes can reach them.
"""

import array
import json
import select
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FRAME = 16 << 20
"""A longer length is not a frame but a broken stream."""


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end. `send` may be called from any thread, `receive` from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, record: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Sends a record, and duplicates of `fds` with it.

        Raises:
            ChannelClosed: the other end is gone.
        """
        body = json.dumps(record, separators=(",", ":")).encode()
        frame = _LENGTH.pack(len(body)) + body
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                sent = self._sock.sendmsg([frame], ancillary)
                self._sock.sendall(frame[sent:])
            except OSError as problem:
                raise ChannelClosed(str(problem)) from problem

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next record, or None when `timeout_s` passed without one.

        Raises:
            ChannelClosed: the other end is gone.
        """
        while True:
            record = self._take()
            if record is not None:
                return record
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return None
            self._fill()

    def receive_ready(self) -> list[dict[str, Any]]:
        """Every record that has arrived, without waiting for more than one read."""
        self._fill()
        records = []
        while (record := self._take()) is not None:
            records.append(record)
        return records

    def receive_with_fds(self, count: int) -> tuple[dict[str, Any], list[int]]:
        """The next record with the descriptors that came with it; blocks.

        Raises:
            ChannelClosed: the other end is gone.
        """
        data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, count)
        if not data:
            raise ChannelClosed("end of stream")
        self._buffer += data
        while (record := self._take()) is None:
            self._fill()
        return record, list(fds)

    def close(self) -> None:
        self._sock.close()

    def _fill(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError as problem:
            raise ChannelClosed(str(problem)) from problem
        if not data:
            raise ChannelClosed("end of stream")
        self._buffer += data

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME:
            raise ChannelClosed(f"a frame of {length} bytes")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return _record(body)


def _record(body: bytes) -> dict[str, Any]:
    try:
        record = json.loads(body)
    except ValueError as problem:
        raise ChannelClosed(f"a frame that is not a record: {problem}") from problem
    if not isinstance(record, dict):
        raise ChannelClosed("a frame that is not a record")
    return record


def channel_pair() -> tuple[Channel, socket.socket]:
    """Two connected ends: ours, and the socket for the other process to inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs
