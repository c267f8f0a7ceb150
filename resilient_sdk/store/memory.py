"""A store in a dictionary: the perfect model that the others are compared with. It dies with its process."""

import threading
from collections.abc import Iterator

from resilient_sdk.errors import HeadMoved, NotFound
from resilient_sdk.store.base import BytesLike, Store, check_key, flat, split_prefix


class MemoryStore(Store):
    """Values of this process; `sync` has nothing to do, for nothing here survives a power loss."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: BytesLike) -> None:
        # A copy: kept by reference, the next capture into the same slot would rewrite a committed chunk.
        copy = bytes(flat(value))
        with self._lock:
            self._values[check_key(key)] = copy

    def get(self, key: str) -> bytes:
        with self._lock:
            value = self._values.get(check_key(key))
        if value is None:
            raise NotFound(f"the store has no {key}", key=key)
        return value

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(check_key(key), None)

    def keys(self, prefix: str = "") -> Iterator[str]:
        split_prefix(prefix)
        with self._lock:
            return iter([key for key in self._values if key.startswith(prefix)])

    def size(self, key: str) -> int:
        return len(self.get(key))

    def compare_and_set(self, key: str, expected: bytes | None, new: bytes) -> None:
        with self._lock:
            found = self._values.get(check_key(key))
            if found != expected:
                raise HeadMoved(f"{key} holds another value than the one expected", key=key, found=found)
            self._values[key] = bytes(new)

    def sync(self) -> None:
        """Nothing to do."""
