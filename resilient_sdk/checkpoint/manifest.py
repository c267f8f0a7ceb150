"""What a rank wrote for a step: the table of its stream, who it is, and its owner's signature.

    resilient-manifest 1\\n          the format; this line is for ever, whatever a later format puts below it
    <HMAC-SHA256, 64 hex>\\n         over the line above and the body below, with the run's key
    {"rank":0,"run":"…","table":…}  canonical JSON

Keys: `rank-00001/chunks/<hash>` and `rank-00001/manifests/<step>-<generation>-<digest>`.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from resilient_sdk.checkpoint.layout import Piece, Table, canonical, table_of
from resilient_sdk.errors import Corrupt, NewerFormat
from resilient_sdk.ids import Generation, Rank, RunId, Step

FORMAT = 1
_FIRST_LINE = re.compile(rb"resilient-manifest ([0-9]{1,9})\n")
_MAC_NBYTES = 64
_KEY_NBYTES = 16
_REF = re.compile(r"rank-([0-9]{5,})/manifests/([0-9]{12,})-([0-9]+)-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One rank's state after one step, as chunks of the store."""

    run: RunId
    rank: Rank
    world_size: int
    table: Table
    format: int = FORMAT

    @property
    def step(self) -> Step:
        return self.table.step

    @property
    def generation(self) -> Generation:
        return self.table.generation

    @property
    def chunks(self) -> Iterator[Piece]:
        """The chunks in the stream's order; a hash may occur more than once."""
        return self.table.pieces()


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """Names one stored manifest. `digest` is of its encoded bytes, 16 hex digits."""

    rank: Rank
    step: Step
    generation: Generation
    digest: str

    @property
    def key(self) -> str:
        """Its key in the store."""
        return f"{manifest_prefix(self.rank)}{self.step:012d}-{self.generation}-{self.digest}"

    @property
    def order(self) -> tuple[Generation, Step]:
        """Newer is greater: a later generation's step is newer even where its number is lower."""
        return (self.generation, self.step)


def rank_name(rank: Rank) -> str:
    """Returns the rank's folder, in the store and in the snapshots' directory."""
    return f"rank-{rank:05d}"


def chunk_prefix(rank: Rank) -> str:
    """Returns what the keys of a rank's chunks start with."""
    return f"{rank_name(rank)}/chunks/"


def manifest_prefix(rank: Rank) -> str:
    """Returns what the keys of a rank's manifests start with."""
    return f"{rank_name(rank)}/manifests/"


def ref_of(manifest: Manifest, encoded: bytes) -> ManifestRef:
    """Returns the reference to a manifest and its encoded bytes."""
    return ManifestRef(manifest.rank, manifest.step, manifest.generation, digest_of(encoded))


def digest_of(encoded: bytes) -> str:
    """Returns the digest that a reference carries."""
    return hashlib.sha256(encoded).hexdigest()[:16]


def parse_ref(key: str) -> ManifestRef | None:
    """Returns the reference whose key this is, or None."""
    match = _REF.fullmatch(key)
    if match is None:
        return None
    rank, step, generation, digest = match.groups()
    return ManifestRef(Rank(int(rank)), Step(int(step)), Generation(int(generation)), digest)


def encode(manifest: Manifest, key: bytes) -> bytes:
    """Returns the signed bytes; the same manifest and key give the same bytes. Raises ValueError for a key
    under 16 bytes, which could be guessed."""
    if len(key) < _KEY_NBYTES:
        raise ValueError(f"a run's key has at least {_KEY_NBYTES} bytes")
    first = f"resilient-manifest {manifest.format}\n".encode()
    body = canonical(_record(manifest))
    return first + _mac(key, first, body) + b"\n" + body


def decode(data: bytes, key: bytes) -> Manifest:
    """Returns the manifest. Raises NewerFormat, and Corrupt for bytes that are damaged, cut off or not signed
    with `key`: nothing of them has been used then."""
    match = _FIRST_LINE.match(data)
    if match is None:
        raise Corrupt("this is no manifest", head=data[:32])
    version = int(match[1])
    if version > FORMAT:
        raise NewerFormat(
            f"a manifest has format {version}, this version reads up to {FORMAT}",
            fix="install the version that wrote it",
            found=version,
            known=FORMAT,
        )
    end = match.end() + _MAC_NBYTES
    body = data[end + 1 :]
    signed = hmac.compare_digest(data[match.end() : end], _mac(key, match[0], body))
    if not signed or data[end : end + 1] != b"\n" or version < 1:
        raise Corrupt("a manifest's signature does not match", fix="use an older step")
    return _manifest(body)


def _mac(key: bytes, first: bytes, body: bytes) -> bytes:
    return hmac.new(key, first + body, hashlib.sha256).hexdigest().encode()


def _record(manifest: Manifest) -> dict[str, Any]:
    return {
        "run": manifest.run,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "table": manifest.table.record(),
    }


def _manifest(body: bytes) -> Manifest:
    try:
        record = json.loads(body)
        run, rank, world_size = str(record["run"]), int(record["rank"]), int(record["world_size"])
        table = record["table"]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"a signed manifest cannot be read: {error!r}") from error
    return Manifest(RunId(run), Rank(rank), world_size, table_of(table))
