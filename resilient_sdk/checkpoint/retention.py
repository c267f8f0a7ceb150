"""What a rank keeps in the store. Its own writer is the only one that writes and deletes there, in one
thread: therefore nothing can come between looking and deleting.

A plan is made first, as a value; then manifests are deleted, then chunks. Stopped in between, chunks are left
that nothing names, never a manifest whose chunks are gone.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from resilient_sdk.checkpoint.layout import Table
from resilient_sdk.checkpoint.manifest import (
    Manifest,
    ManifestRef,
    chunk_prefix,
    manifest_prefix,
    parse_ref,
)
from resilient_sdk.checkpoint.reader import read_manifest
from resilient_sdk.checkpoint.writer import Identity
from resilient_sdk.errors import CheckpointError, NotFound
from resilient_sdk.ids import Step
from resilient_sdk.store.base import Store

_logger = logging.getLogger(__name__)

Stored = Mapping[ManifestRef, Manifest | None]
"""The manifests of a rank; None for one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Keep the `keep` newest committed steps, and all that is newer than the head. Above `budget_bytes` (of
    this rank's chunks; None: no limit) only the head's step and what is newer.

    `nice` is the uploading thread's priority, 19 the lowest. The lowest leaves training alone as long as a
    core is free now and then. Where more threads want to run than there are cores it starves the uploads, and
    a thread that waits for a core while it has the interpreter's lock makes training wait, too: 5 is better
    there.
    """

    keep: int = 2
    budget_bytes: int | None = None
    nice: int = 19

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError("the head's own step is always kept")


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be deleted: first `manifests`, then `chunks`."""

    manifests: tuple[ManifestRef, ...]
    chunks: tuple[str, ...]


def choose(stored: Iterable[ManifestRef], committed: Collection[Step], keep: int) -> frozenset[ManifestRef]:
    """Returns what to keep. Before the first commit that is everything: any of it may be committed yet."""
    if not committed:
        return frozenset(stored)
    newest = sorted(committed)[-keep:]
    return frozenset(ref for ref in stored if ref.step > newest[-1] or ref.step in newest)


def plan(stored: Stored, kept: Collection[ManifestRef]) -> Plan:
    """Returns how to get rid of everything but `kept`."""
    manifests = tuple(ref for ref in stored if ref not in kept)
    if any(stored[ref] is None for ref in kept):
        # Nobody knows what it names: perhaps a newer version does, perhaps the key given is the wrong one.
        return Plan(manifests, ())
    gone = _sizes(stored[ref] for ref in manifests)
    needed = _sizes(stored[ref] for ref in kept)
    return Plan(manifests, tuple(digest for digest in gone if digest not in needed))


class Namespace:
    """One rank's part of the store. Belongs to one thread."""

    def __init__(self, store: Store, identity: Identity, policy: Policy) -> None:
        self._store = store
        self._identity = identity
        self._policy = policy
        self._stored: dict[ManifestRef, Manifest | None] = {}
        self._clean = False

    @property
    def refs(self) -> frozenset[ManifestRef]:
        """The manifests that are known to be stored."""
        return frozenset(self._stored)

    def open(self) -> None:
        """Learns what is stored and deletes chunks that no manifest names. Does nothing if that is known;
        after `doubt` it looks again. Raises StoreError."""
        if self._clean:
            return
        keys = list(self._store.keys(manifest_prefix(self._identity.rank)))
        self._stored = {ref: self._load(ref) for ref in map(parse_ref, keys) if ref}
        if None not in self._stored.values():
            self._sweep()
        self._clean = True

    def doubt(self) -> None:
        """A write has failed: what is stored is unknown."""
        self._clean = False

    def add(self, ref: ManifestRef, manifest: Manifest) -> None:
        """A manifest was stored."""
        self._stored[ref] = manifest

    def retain(self, committed: Collection[Step]) -> None:
        """Deletes what the policy does not keep. Raises StoreError; what is left then goes at the next
        `open`."""
        self.open()
        self._execute(plan(self._stored, choose(self._stored, committed, self._policy.keep)))

    def make_room(self, table: Table, committed: Collection[Step]) -> str:
        """Makes room for a snapshot within the budget. Returns "", or why there is none. Raises
        StoreError."""
        budget = self._policy.budget_bytes
        if budget is None or self._with(table) <= budget:
            return ""
        self._execute(plan(self._stored, choose(self._stored, committed, 1)))
        used = self._with(table)
        return "" if used <= budget else f"{used} bytes would exceed the budget of {budget}"

    def _with(self, table: Table) -> int:
        sizes = _sizes(self._stored.values())
        sizes.update({piece.hash: piece.nbytes for piece in table.pieces()})
        return sum(sizes.values())

    def _execute(self, deletions: Plan) -> None:
        # In doubt until done: what a failed deletion leaves must be swept.
        whole = self._clean and all(self._stored[ref] is not None for ref in deletions.manifests)
        self._clean = False
        for ref in deletions.manifests:
            self._store.delete(ref.key)
            del self._stored[ref]
        for digest in deletions.chunks:
            self._store.delete(chunk_prefix(self._identity.rank) + digest)
        self._clean = whole

    def _load(self, ref: ManifestRef) -> Manifest | None:
        try:
            return read_manifest(self._store, ref, self._identity.key)
        except (CheckpointError, NotFound) as error:
            _logger.warning("the manifest %s cannot be read: %s", ref.key, error)
            return None

    def _sweep(self) -> None:
        prefix = chunk_prefix(self._identity.rank)
        named = _sizes(self._stored.values())
        for key in list(self._store.keys(prefix)):
            if key.removeprefix(prefix) not in named:
                self._store.delete(key)


def _sizes(manifests: Iterable[Manifest | None]) -> dict[str, int]:
    return {piece.hash: piece.nbytes for manifest in manifests if manifest for piece in manifest.chunks}
