"""A rank's state on its way to memory and to the store, and back. See FORMAT.md. Never imports torch."""

from resilient_sdk.checkpoint.drain import commit_from_memory, snapshot_directory
from resilient_sdk.checkpoint.head import Head, move_head, read_head
from resilient_sdk.checkpoint.layout import Bytes, Sizes, Source, State
from resilient_sdk.checkpoint.manifest import Manifest, ManifestRef
from resilient_sdk.checkpoint.reader import read_state, stored_steps
from resilient_sdk.checkpoint.retention import Policy
from resilient_sdk.checkpoint.snapshot import Snapshot, SnapshotFile
from resilient_sdk.checkpoint.uploader import Failed, Outcome, Skipped, Stored, Uploader
from resilient_sdk.checkpoint.writer import Identity, store_snapshot

__all__ = [
    "Bytes",
    "Failed",
    "Head",
    "Identity",
    "Manifest",
    "ManifestRef",
    "Outcome",
    "Policy",
    "Sizes",
    "Skipped",
    "Snapshot",
    "SnapshotFile",
    "Source",
    "State",
    "Stored",
    "Uploader",
    "commit_from_memory",
    "move_head",
    "read_head",
    "read_state",
    "snapshot_directory",
    "store_snapshot",
    "stored_steps",
]
