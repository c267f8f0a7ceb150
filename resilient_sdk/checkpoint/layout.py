"""A rank's state as one stream of bytes: arrays at aligned offsets, then the scalars, cut into chunks.

    | array 0 |pad| array 1 |pad| … | scalars |        offsets are multiples of 64, padding is zero
    |  chunk 0  |  chunk 1  | …  |chunk n|             4 MiB each, the last one shorter

The `Table` says what lies where and what every chunk's hash is. It is written with a snapshot and, signed,
with a manifest. Nothing here touches a file or a store.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from resilient_sdk.errors import Corrupt
from resilient_sdk.ids import Generation, Step

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Bytes as numpy sees them: uint8, one-dimensional, contiguous."""

CHUNK_NBYTES = 4 * 1024 * 1024
BLOCK_NBYTES = 256 * 1024
ALIGNMENT = 64


class Source(Protocol):
    """One array of a rank's state as training sees it."""

    @property
    def name(self) -> str:
        """Unique in the state, the same at every step."""
        ...

    @property
    def nbytes(self) -> int:
        """Length in bytes; may be 0."""
        ...

    def copy_into(self, target: Bytes, offset: int) -> None:
        """Fills `target` with the array's bytes from `offset` on. Returns when they are there."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """A rank's state, verified. The arrays are read-only uint8 views; `scalars` is training's own blob."""

    arrays: Mapping[str, Bytes]
    scalars: bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes in a chunk, and bytes that are copied and hashed at a time. A block should fit the core's cache;
    a device that is slow to start a copy wants larger ones."""

    chunk: int = CHUNK_NBYTES
    block: int = BLOCK_NBYTES


class Place(NamedTuple):
    """Where one array lies in the stream, in bytes."""

    name: str
    offset: int
    nbytes: int


class Piece(NamedTuple):
    """One chunk: its xxh3_128 in hex, and where it lies in the stream."""

    hash: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """What a stream holds. `nbytes` counts all of it; the scalars are its end. The scalars have a
    cryptographic hash of their own: training unpickles them, and xxh3 does not withstand someone who forges a
    chunk."""

    step: Step
    generation: Generation
    nbytes: int
    arrays: tuple[Place, ...]
    scalars_nbytes: int
    scalars_sha256: str
    chunk_nbytes: int
    chunks: tuple[str, ...]

    def pieces(self) -> Iterator[Piece]:
        """Yields the chunks in order."""
        for number, digest in enumerate(self.chunks):
            offset = number * self.chunk_nbytes
            yield Piece(digest, offset, min(self.chunk_nbytes, self.nbytes - offset))

    def record(self) -> dict[str, Any]:
        """Returns the table as JSON values."""
        return {
            "step": self.step,
            "generation": self.generation,
            "nbytes": self.nbytes,
            "arrays": [list(place) for place in self.arrays],
            "scalars_nbytes": self.scalars_nbytes,
            "scalars_sha256": self.scalars_sha256,
            "chunk_nbytes": self.chunk_nbytes,
            "chunks": list(self.chunks),
        }


def table_of(record: Mapping[str, Any]) -> Table:
    """Returns the table of `Table.record`. Raises Corrupt where something is missing or does not add up."""
    try:
        table = Table(
            step=Step(int(record["step"])),
            generation=Generation(int(record["generation"])),
            nbytes=int(record["nbytes"]),
            arrays=tuple(
                Place(str(name), int(offset), int(nbytes)) for name, offset, nbytes in record["arrays"]
            ),
            scalars_nbytes=int(record["scalars_nbytes"]),
            scalars_sha256=str(record["scalars_sha256"]),
            chunk_nbytes=int(record["chunk_nbytes"]),
            chunks=tuple(map(str, record["chunks"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"a table cannot be read: {error!r}") from error
    if not _adds_up(table):
        raise Corrupt("a table does not add up", step=table.step)
    return table


def _adds_up(table: Table) -> bool:
    # What is checked here is used as offsets: a slice out of bounds would be shorter without a word.
    end = table.nbytes - table.scalars_nbytes
    if not (table.chunk_nbytes > 0 <= table.scalars_nbytes and end >= 0):
        return False
    inside = all(place.offset >= 0 <= place.nbytes <= end - place.offset for place in table.arrays)
    return inside and len(table.chunks) == -(-table.nbytes // table.chunk_nbytes)


def place_arrays(sources: Sequence[Source]) -> tuple[Place, ...]:
    """Returns where each array goes, in the order given. Raises ValueError for a name that occurs twice."""
    places: list[Place] = []
    end = 0
    for source in sources:
        places.append(Place(source.name, aligned(end), source.nbytes))
        end = aligned(end) + source.nbytes
    if len({place.name for place in places}) != len(places):
        raise ValueError("two arrays of a state have the same name")
    return tuple(places)


def end_of(places: Sequence[Place]) -> int:
    """Returns where the scalars begin."""
    return aligned(places[-1].offset + places[-1].nbytes) if places else 0


def aligned(offset: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def chunk_hash(data: Bytes | bytes) -> str:
    """Returns the hash that names a chunk."""
    return xxhash.xxh3_128_hexdigest(data.data if isinstance(data, np.ndarray) else data)


def scalars_hash(scalars: bytes) -> str:
    """Returns the cryptographic hash of the scalars."""
    return hashlib.sha256(scalars).hexdigest()


def canonical(record: Mapping[str, Any]) -> bytes:
    """Returns JSON in the one spelling that hashes and signatures are made of."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode("ascii")


def verify(table: Table, stream: Bytes) -> None:
    """Checks every chunk of `stream`. Raises Corrupt with the step and the number of the first bad one."""
    for number, piece in enumerate(table.pieces()):
        if chunk_hash(stream[piece.offset : piece.offset + piece.nbytes]) != piece.hash:
            raise Corrupt(
                f"chunk {number} of step {table.step} does not match its hash",
                fix="use another copy or an older step",
                step=table.step,
                generation=table.generation,
                chunk=number,
            )


def state_of(table: Table, stream: Bytes) -> State:
    """Returns the state that `stream` holds, as read-only views of it. Raises Corrupt for forged scalars."""
    view = stream.view()
    view.flags.writeable = False
    scalars = view[table.nbytes - table.scalars_nbytes : table.nbytes].tobytes()
    if scalars_hash(scalars) != table.scalars_sha256:
        raise Corrupt(f"the scalars of step {table.step} do not match their hash", step=table.step)
    arrays = {place.name: view[place.offset : place.offset + place.nbytes] for place in table.arrays}
    return State(MappingProxyType(arrays), scalars)
