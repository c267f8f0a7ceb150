"""Where chunks, manifests and the head live: one port, its adapters, and the contract they all pass."""

from resilient_sdk.store.address import open_store
from resilient_sdk.store.base import BytesLike, Store
from resilient_sdk.store.files import FileStore
from resilient_sdk.store.memory import MemoryStore

__all__ = ["BytesLike", "FileStore", "MemoryStore", "Store", "open_store"]
