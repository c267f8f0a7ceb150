"""The one mutable key of a run: the newest step for which every rank's manifest is stored.

    resilient-head 1\\n        the format; this line is for ever
    <xxh3_128, 32 hex>\\n      over the line above and the body below
    {"step":…,"refs":[…],…}   canonical JSON

The hash finds damage, not forgery: what the head names is signed, and a forged head can only name that.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import xxhash

from resilient_sdk.checkpoint.layout import canonical
from resilient_sdk.checkpoint.manifest import ManifestRef
from resilient_sdk.errors import (
    Corrupt,
    HeadMoved,
    InvalidTransition,
    NewerFormat,
    NotFound,
    StaleGeneration,
)
from resilient_sdk.ids import Generation, Rank, Step
from resilient_sdk.store.base import Store

FORMAT = 1
HEAD_KEY = "head"
_FIRST_LINE = re.compile(rb"resilient-head ([0-9]{1,9})\n")
_HASH_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Head:
    """A committed step. `generation` is the one that committed it; `refs` has every rank's manifest, in
    order, of this step (and perhaps of an earlier generation: a snapshot outlives the membership that made
    it)."""

    step: Step
    generation: Generation
    world_size: int
    refs: tuple[ManifestRef, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        # A head that misses a rank, or mixes steps, is a state that never was.
        ranks = [ref.rank for ref in self.refs]
        if ranks != list(range(self.world_size)) or any(ref.step != self.step for ref in self.refs):
            raise ValueError("a head needs one manifest of its step for each rank, in order")


def read_head(store: Store) -> Head | None:
    """Returns the head, or None where nothing was ever committed. Raises Corrupt, NewerFormat, StoreError."""
    raw = _read(store)
    return None if raw is None else decode_head(raw)


def move_head(store: Store, current: Head | None, new: Head) -> None:
    """Commits `new`, if the head is still `current`. Repeating a call that had succeeded is no error.

    Raises StaleGeneration if a later generation has committed, InvalidTransition for a step below the
    committed one, HeadMoved (`evidence["found"]` is a Head or None) if the head is not `current`.
    """
    raw = _read(store)
    found = None if raw is None else decode_head(raw)
    if found == new:
        return
    _require_forward(found, new)
    if found != current:
        raise HeadMoved("the head is not the one expected", fix="read it again", found=found)
    try:
        store.compare_and_set(HEAD_KEY, raw, encode_head(new))
    except HeadMoved as moved:
        now = moved.evidence["found"]
        found = decode_head(now) if isinstance(now, bytes) else None
        raise HeadMoved("the head has just moved", fix="read it again", found=found) from moved


def encode_head(head: Head) -> bytes:
    """Returns the bytes under the head's key."""
    first = f"resilient-head {head.format}\n".encode()
    body = canonical(_record(head))
    return first + _hash(first, body) + b"\n" + body


def decode_head(raw: bytes) -> Head:
    """Returns the head in `raw`. Raises Corrupt and NewerFormat."""
    match = _FIRST_LINE.match(raw)
    if match is None:
        raise Corrupt("this is no head", head=raw[:32])
    version = int(match[1])
    if version > FORMAT:
        raise NewerFormat(
            f"the head has format {version}, this version reads up to {FORMAT}",
            fix="install the version that wrote it",
            found=version,
            known=FORMAT,
        )
    end = match.end() + _HASH_NBYTES
    body = raw[end + 1 :]
    if raw[match.end() : end + 1] != _hash(match[0], body) + b"\n" or version < 1:
        raise Corrupt("the head does not match its hash", fix="name an older step's manifests again")
    return _head(body)


def _require_forward(found: Head | None, new: Head) -> None:
    if found is None:
        return
    if new.generation < found.generation:
        raise StaleGeneration(
            f"generation {new.generation} cannot commit: generation {found.generation} has", found=found
        )
    if new.step < found.step:
        raise InvalidTransition(f"step {found.step} is committed, step {new.step} is older", found=found)


def _read(store: Store) -> bytes | None:
    try:
        return store.get(HEAD_KEY)
    except NotFound:
        return None


def _hash(first: bytes, body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(first + body).encode()


def _record(head: Head) -> dict[str, Any]:
    return {
        "step": head.step,
        "generation": head.generation,
        "world_size": head.world_size,
        "refs": [[ref.rank, ref.step, ref.generation, ref.digest] for ref in head.refs],
    }


def _head(body: bytes) -> Head:
    try:
        record = json.loads(body)
        refs = tuple(
            ManifestRef(Rank(int(rank)), Step(int(step)), Generation(int(generation)), str(digest))
            for rank, step, generation, digest in record["refs"]
        )
        step, generation = Step(int(record["step"])), Generation(int(record["generation"]))
        return Head(step, generation, int(record["world_size"]), refs)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"the head cannot be read: {error!r}") from error
