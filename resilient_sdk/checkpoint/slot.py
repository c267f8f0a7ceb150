"""One snapshot in one file of shared memory: a header, the stream, the table. See FORMAT.md.

The header is the completion mark. It is cleared before the first byte of a new snapshot and written after the
last; its own hash covers it, so that a kill between any two instructions leaves a whole snapshot or none.
"""

import json
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from resilient_sdk.checkpoint.layout import Bytes, Table, aligned, canonical, table_of, verify
from resilient_sdk.errors import Corrupt, NewerFormat
from resilient_sdk.store.directories import io_errors

FORMAT = 1
STREAM_OFFSET = 4096
_MAGIC = b"RSSNAP\r\n"
_FIELDS = struct.Struct("<8sQQQQQ16s")  # magic, format, step, generation, stream, table, table's hash
_HEADER_NBYTES = _FIELDS.size + 16
_GROWTH = 256 * 1024
_FULL_FIX = "enlarge /dev/shm (docker: --shm-size) or give another snapshot directory"


@dataclass(frozen=True, slots=True)
class Header:
    """What a completion mark says. Lengths are bytes."""

    generation: int
    step: int
    stream_nbytes: int
    table_nbytes: int
    table_hash: bytes

    @property
    def order(self) -> tuple[int, int]:
        """Newer is greater: a later generation's step is newer even where its number is lower."""
        return (self.generation, self.step)

    @property
    def end(self) -> int:
        """The least length of a file with this header."""
        return _table_offset(self.stream_nbytes) + self.table_nbytes


class Slot:
    """One slot file. The mapping is kept between snapshots and its pages are used again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: Bytes | None = None
        self._backed = False  # every page of the mapping is known to exist

    @property
    def in_use(self) -> bool:
        """Whether the file exists: writing into one that does not costs its allocation."""
        return self._bytes is not None or self._path.exists()

    def header(self) -> Header | None:
        """Returns the completion mark, or None: never written, incomplete, damaged. Raises NewerFormat."""
        data = self._mapped()
        if data is None:
            return None
        header = _decode(data[:_HEADER_NBYTES].tobytes(), self._path)
        if header and header.end > len(data):
            self._map(0)  # another process has made the file longer since it was mapped here
        return header if header and self._bytes is not None and header.end <= len(self._bytes) else None

    def invalidate(self) -> None:
        """Makes the slot incomplete."""
        data = self._mapped()
        if data is not None:
            data[:_HEADER_NBYTES] = 0

    def begin(self, nbytes: int, table_nbytes: int) -> Bytes:
        """Makes the slot incomplete and returns room for a stream, with `table_nbytes` to spare.

        Raises StoreFull where memory lacks: here, and not as a SIGBUS while a page is touched.
        """
        self.invalidate()
        data = self._with_room(_table_offset(nbytes) + table_nbytes)
        return data[STREAM_OFFSET : STREAM_OFFSET + nbytes]

    def finish(self, table: Table) -> Header:
        """Writes the table of a filled stream, then the completion mark, last."""
        text = canonical(table.record())
        header = Header(table.generation, table.step, table.nbytes, len(text), xxhash.xxh3_128_digest(text))
        data = self._with_room(header.end)
        data[header.end - len(text) : header.end] = np.frombuffer(text, np.uint8)
        data[:_HEADER_NBYTES] = np.frombuffer(_encode(header), np.uint8)
        return header

    def table(self, header: Header) -> Table:
        """Returns the table that `header` marks. Raises Corrupt."""
        data = self._mapped()
        text = b"" if data is None else data[header.end - header.table_nbytes : header.end].tobytes()
        evidence: dict[str, Any] = {
            "step": header.step,
            "generation": header.generation,
            "path": str(self._path),
        }
        if xxhash.xxh3_128_digest(text) != header.table_hash:
            raise Corrupt(f"the table of step {header.step} does not match its hash", **evidence)
        table = table_of(json.loads(text))
        if (table.generation, table.step, table.nbytes) != (*header.order, header.stream_nbytes):
            raise Corrupt(f"the table of step {header.step} is another step's", **evidence)
        return table

    def stream(self, header: Header) -> Bytes:
        """Returns a read-only view of the stream, unverified. It changes when the slot is used again."""
        data = self._mapped()
        if data is None:
            raise Corrupt(f"{self._path} is gone", step=header.step)
        view = data[STREAM_OFFSET : STREAM_OFFSET + header.stream_nbytes]
        view.flags.writeable = False
        return view

    def verified(self, header: Header) -> tuple[Table, Bytes]:
        """Returns table and stream after checking every hash. Raises Corrupt."""
        table, stream = self.table(header), self.stream(header)
        verify(table, stream)
        return table, stream

    def close(self) -> None:
        """Forgets the mapping. It goes away with the last view of it, for a view must never dangle."""
        self._bytes = None
        self._backed = False

    def remove(self) -> None:
        """Closes and deletes the file."""
        self.close()
        with suppress(FileNotFoundError):
            self._path.unlink()

    def _mapped(self) -> Bytes | None:
        if self._bytes is None and self._path.exists():
            self._map(0)
        return self._bytes

    def _with_room(self, nbytes: int) -> Bytes:
        data = self._mapped()
        if data is None or not self._backed or len(data) < nbytes:
            known = 0 if data is None else len(data)
            # Rounded up: scalars that grow by a byte must not cost a new mapping each step.
            self._map(max(known, -(-nbytes // _GROWTH) * _GROWTH))
        if self._bytes is None:
            raise AssertionError("mapped above")
        return self._bytes

    def _map(self, allocate: int) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if allocate else 0)
        with io_errors(f"no room for a snapshot of {allocate} bytes in {self._path.parent}", fix=_FULL_FIX):
            file = os.open(self._path, flags, 0o600)
            try:
                if allocate:
                    os.posix_fallocate(file, 0, allocate)
                length = os.fstat(file).st_size
                self._bytes = _map_file(file, length) if length >= STREAM_OFFSET else None
            finally:
                os.close(file)
        self._backed = allocate > 0


def _map_file(file: int, length: int) -> Bytes:
    # Populated at once: a fault a page while capturing costs more than the copy.
    mapping = mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(mapping, np.uint8)


def _table_offset(stream_nbytes: int) -> int:
    return aligned(STREAM_OFFSET + stream_nbytes)


def _encode(header: Header) -> bytes:
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT,
        header.step,
        header.generation,
        header.stream_nbytes,
        header.table_nbytes,
        header.table_hash,
    )
    return fields + xxhash.xxh3_128_digest(fields)


def _decode(raw: bytes, path: Path) -> Header | None:
    fields, digest = raw[: _FIELDS.size], raw[_FIELDS.size :]
    if not fields.startswith(_MAGIC) or xxhash.xxh3_128_digest(fields) != digest:
        return None
    _, version, step, generation, stream, table, table_hash = _FIELDS.unpack(fields)
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has snapshot format {version}, this version reads up to {FORMAT}",
            fix="install the version that wrote it, or remove the directory",
            found=version,
            known=FORMAT,
        )
    return Header(generation, step, stream, table, table_hash)
