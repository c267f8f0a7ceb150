"""What every store must do, as tests. An adapter's test file inherits `StoreContract`, gives the `store`
fixture and `reopen`, and is done. Needs pytest, which a user of the package does not."""

import threading

import numpy as np
import pytest

from resilient_sdk.errors import HeadMoved, NotFound, StoreError
from resilient_sdk.store.base import BytesLike, Store

_LARGE = 4 * 1024 * 1024
BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "A",
    "a b",
    "a\\b",
    "a\0",
    "a\n",
    "é",
    "~a",
    "a+",
    "a" * 201,
)


class StoreContract:
    """Inherit it as `Test…`; each test gets an empty store."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """Another object on the same values, as another process would open it."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", [0, 1, 4095, _LARGE, _LARGE + 1])
    def test_a_value_comes_back(self, store: Store, size: int) -> None:
        value = bytes(range(256)) * (size // 256 + 1)
        store.put("a/b", value[:size])
        assert store.get("a/b") == value[:size]
        assert store.size("a/b") == size
        assert self.reopen(store).get("a/b") == value[:size]

    @pytest.mark.parametrize(
        "value",
        [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], np.frombuffer(b"abc", np.uint8)],
        ids=["bytes", "bytearray", "memoryview", "array"],
    )
    def test_any_buffer_is_taken(self, store: Store, value: BytesLike) -> None:
        store.put("k", value)
        assert store.get("k") == b"abc"

    def test_an_empty_array_is_taken(self, store: Store) -> None:
        store.put("k", np.empty(0, np.uint8))
        assert store.get("k") == b""

    def test_a_value_does_not_alias_what_was_put(self, store: Store) -> None:
        value = bytearray(b"before")
        store.put("k", value)
        value[:] = b"after!"
        assert store.get("k") == b"before"

    def test_put_replaces_and_repeats(self, store: Store) -> None:
        store.put("k", b"long value")
        store.put("k", b"v")
        store.put("k", b"v")
        assert store.get("k") == b"v"
        assert list(store.keys()) == ["k"]

    def test_absence(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.get("a/b")
        with pytest.raises(NotFound):
            store.size("a")
        store.delete("a/b")
        assert list(store.keys("a/")) == []

    def test_delete_repeats(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        with pytest.raises(NotFound):
            store.get("a/b")
        assert list(store.keys()) == []

    def test_keys_by_prefix(self, store: Store) -> None:
        names = {
            "head",
            "rank-0/chunks/a",
            "rank-0/chunks/ab",
            "rank-0/manifests/a",
            "rank-1/chunks/a",
            "..a/b",
        }
        for name in names:
            store.put(name, b"")
        for prefix in (
            "",
            "h",
            "head",
            "rank-",
            "rank-0/",
            "rank-0/chunks/a",
            "rank-0/c",
            "rank-2/",
            "x/y/z",
            ".",
        ):
            found = list(store.keys(prefix))
            assert len(found) == len(set(found))
            assert set(found) == {name for name in names if name.startswith(prefix)}

    def test_a_key_may_be_the_folder_of_another(self, store: Store) -> None:
        for name in ("a/b/c", "a/b", "a"):
            store.put(name, name.encode())
        assert {name: store.get(name) for name in store.keys("a")} == {
            "a": b"a",
            "a/b": b"a/b",
            "a/b/c": b"a/b/c",
        }

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, store: Store, key: str) -> None:
        with pytest.raises(StoreError):
            store.put(key, b"")
        with pytest.raises(StoreError):
            store.get(key)
        with pytest.raises(StoreError):
            store.delete(key)
        with pytest.raises(StoreError):
            store.size(key)
        with pytest.raises(StoreError):
            store.compare_and_set(key, None, b"")

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//", "/a", "A"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(StoreError):
            list(store.keys(prefix))

    def test_compare_and_set(self, store: Store) -> None:
        store.compare_and_set("head", None, b"1")
        store.compare_and_set("head", b"1", b"2")
        assert self.reopen(store).get("head") == b"2"
        for expected in (None, b"1", b""):
            with pytest.raises(HeadMoved) as caught:
                store.compare_and_set("head", expected, b"3")
            assert caught.value.evidence["found"] == b"2"
        with pytest.raises(HeadMoved) as caught:
            store.compare_and_set("other", b"", b"3")
        assert caught.value.evidence["found"] is None
        assert store.get("head") == b"2"

    def test_an_empty_value_is_not_an_absent_one(self, store: Store) -> None:
        store.compare_and_set("head", None, b"")
        with pytest.raises(HeadMoved):
            store.compare_and_set("head", None, b"1")
        store.compare_and_set("head", b"", b"1")

    def test_of_two_racing_setters_one_wins(self, store: Store) -> None:
        stores = (store, self.reopen(store))
        current: bytes | None = None
        for turn in range(50):
            values = [f"{turn}-{racer}".encode() for racer in range(2)]
            current = _race(stores, current, values)
            assert store.get("head") == current

    def test_readers_never_see_half_a_value(self, store: Store) -> None:
        values = [bytes([letter]) * size for letter, size in ((65, 100_000), (66, 3), (67, 250_000))]
        store.put("k", values[0])
        done = threading.Event()
        seen: list[bytes] = []

        def read() -> None:
            reader = self.reopen(store)
            while not done.is_set():
                seen.append(reader.get("k"))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for turn in range(100):
                store.put("k", values[turn % 3])
        finally:
            done.set()
            thread.join()
        assert set(seen) <= set(values)

    def test_delete_during_read(self, store: Store) -> None:
        value = b"x" * _LARGE
        done = threading.Event()
        seen: set[bytes | None] = set()

        def read() -> None:
            while not done.is_set():
                try:
                    seen.add(store.get("k"))
                except NotFound:
                    seen.add(None)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in range(30):
                store.put("k", value)
                store.delete("k")
        finally:
            done.set()
            thread.join()
        assert seen <= {value, None}

    def test_sync_and_close_repeat(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.sync()
        store.delete("a/b")
        store.put("a/c", b"2")
        store.sync()
        store.sync()
        store.close()
        store.close()
        assert self.reopen(store).get("a/c") == b"2"


def _race(stores: tuple[Store, Store], current: bytes | None, values: list[bytes]) -> bytes:
    """Sets from two threads at once; returns the winner's value."""
    barrier = threading.Barrier(2)
    won: list[bytes] = []
    found: list[object] = []

    def run(store: Store, value: bytes) -> None:
        barrier.wait()
        try:
            store.compare_and_set("head", current, value)
        except HeadMoved as moved:
            found.append(moved.evidence["found"])
        else:
            won.append(value)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(stores, values, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert found == won, "the loser is told what it lost to"
    return won[0]
