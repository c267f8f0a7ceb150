"""From the store back to a rank's state: the exact reverse of `writer`, every hash checked on the way."""

import logging

import numpy as np

from resilient_sdk.checkpoint.layout import Bytes, Piece, State, chunk_hash, state_of
from resilient_sdk.checkpoint.manifest import (
    Manifest,
    ManifestRef,
    chunk_prefix,
    decode,
    digest_of,
    manifest_prefix,
    parse_ref,
    ref_of,
)
from resilient_sdk.errors import CheckpointError, Corrupt, NotFound
from resilient_sdk.ids import Rank
from resilient_sdk.store.base import Store

_logger = logging.getLogger(__name__)


def read_state(store: Store, ref: ManifestRef, key: bytes) -> State:
    """Returns the state that `ref` names.

    Raises Corrupt (evidence: rank, step, chunk) for anything missing, cut off, damaged or not signed with
    `key`; NotFound where the manifest itself is gone; NewerFormat; StoreUnavailable.
    """
    manifest = read_manifest(store, ref, key)
    stream = np.empty(manifest.table.nbytes, np.uint8)
    for number, piece in enumerate(manifest.chunks):
        _read_chunk(store, ref, number, piece, stream)
    return state_of(manifest.table, stream)


def read_manifest(store: Store, ref: ManifestRef, key: bytes) -> Manifest:
    """Returns the manifest that `ref` names. Raises as `read_state` does."""
    data = store.get(ref.key)
    manifest = decode(data, key)
    # Signed once does not mean named here: an older manifest under this key is signed, too.
    if digest_of(data) != ref.digest or ref_of(manifest, data) != ref:
        raise Corrupt(f"{ref.key} holds another manifest", rank=ref.rank, step=ref.step)
    return manifest


def stored_steps(store: Store, rank: Rank, key: bytes) -> tuple[ManifestRef, ...]:
    """Returns the manifests of one rank that can be read, newest step first; others are logged and left
    out."""
    refs = [ref for name in store.keys(manifest_prefix(rank)) if (ref := parse_ref(name))]
    readable = (ref for ref in refs if _is_readable(store, ref, key))
    return tuple(sorted(readable, key=lambda ref: (ref.step, ref.generation), reverse=True))


def _is_readable(store: Store, ref: ManifestRef, key: bytes) -> bool:
    try:
        read_manifest(store, ref, key)
    except (CheckpointError, NotFound) as error:
        _logger.warning("the manifest %s is not used: %s", ref.key, error)
        return False
    return True


def _read_chunk(store: Store, ref: ManifestRef, number: int, piece: Piece, stream: Bytes) -> None:
    try:
        data = store.get(chunk_prefix(ref.rank) + piece.hash)
    except NotFound as error:
        raise _bad_chunk(ref, number, "is missing") from error
    if len(data) != piece.nbytes:
        raise _bad_chunk(ref, number, f"has {len(data)} bytes and not {piece.nbytes}")
    target = stream[piece.offset : piece.offset + piece.nbytes]
    target[:] = np.frombuffer(data, np.uint8)
    # Of the copy, not of `data`: what is checked is what will be used.
    if chunk_hash(target) != piece.hash:
        raise _bad_chunk(ref, number, "does not match its hash")


def _bad_chunk(ref: ManifestRef, number: int, what: str) -> Corrupt:
    return Corrupt(
        f"chunk {number} of rank {ref.rank}, step {ref.step} {what}",
        fix="use another copy or an older step",
        rank=ref.rank,
        step=ref.step,
        chunk=number,
    )
