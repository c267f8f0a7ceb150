"""Stores around a store: slowness and failure are composed, not mocked."""

import threading
from collections.abc import Callable, Iterator

from resilient_sdk.clock import SYSTEM_CLOCK, Clock
from resilient_sdk.errors import StoreUnavailable
from resilient_sdk.store.base import BytesLike, Store


class WrappedStore(Store):
    """Passes every call on, after `before(method)`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def before(self, method: str) -> None:
        """Called with the method's name before each call; what it raises, the caller gets."""

    def put(self, key: str, value: BytesLike) -> None:
        self.before("put")
        self.inner.put(key, value)

    def get(self, key: str) -> bytes:
        self.before("get")
        return self.inner.get(key)

    def delete(self, key: str) -> None:
        self.before("delete")
        self.inner.delete(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        self.before("keys")
        return self.inner.keys(prefix)

    def size(self, key: str) -> int:
        self.before("size")
        return self.inner.size(key)

    def compare_and_set(self, key: str, expected: bytes | None, new: bytes) -> None:
        self.before("compare_and_set")
        self.inner.compare_and_set(key, expected, new)

    def sync(self) -> None:
        self.before("sync")
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class FaultyStore(WrappedStore):
    """Lets the first `calls` calls pass and fails every later one, like a store seen by a process that dies.
    `made` counts the calls, also failed ones."""

    def __init__(self, inner: Store, calls: int, error: Callable[[], BaseException] | None = None) -> None:
        super().__init__(inner)
        self.made = 0
        self._calls = calls
        self._error = error or (
            lambda: StoreUnavailable("injected: the store is gone", fix="none, it is a drill")
        )
        self._lock = threading.Lock()

    def before(self, method: str) -> None:  # noqa: ARG002
        with self._lock:
            self.made += 1
            failing = self.made > self._calls
        if failing:
            raise self._error()


class SlowStore(WrappedStore):
    """Waits `seconds` before each put."""

    def __init__(self, inner: Store, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._clock = clock

    def before(self, method: str) -> None:
        if method == "put":
            self._clock.sleep(self._seconds)
