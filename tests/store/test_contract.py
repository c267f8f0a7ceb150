"""The contract, run on every store, and the file store compared with the model by hypothesis."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilient_sdk.errors import HeadMoved, NotFound
from resilient_sdk.store import FileStore, MemoryStore, Store
from resilient_sdk.store.contract import StoreContract
from resilient_sdk.store.wrappers import WrappedStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    def reopen(self, store: Store) -> Store:
        return store


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        self.place = tmp_path / "deep" / "store"
        return FileStore(self.place)

    def reopen(self, store: Store) -> Store:
        return FileStore(self.place)


class TestWrappedStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return WrappedStore(MemoryStore())

    def reopen(self, store: Store) -> Store:
        return store


KEYS = st.sampled_from(["head", "a", "a/b", "a/b/c", "ab", "a.b/c", "rank-00001/chunks/00ff"])
VALUES = st.one_of(st.binary(max_size=64), st.just(b"z" * 70_000))


class FilesAgainstTheModel(RuleBasedStateMachine):
    """Any sequence of calls gives the same answers from files as from the perfect model."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.store: Store = FileStore(self.place)
        self.model: Store = MemoryStore()

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.store.put(key, value)
        self.model.put(key, value)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.delete(key)

    @rule(key=KEYS, new=VALUES, stale=st.booleans())
    def compare_and_set(self, key: str, new: bytes, stale: bool) -> None:
        expected = b"stale" if stale else _get(self.model, key)
        assert _set(self.store, key, expected, new) == _set(self.model, key, expected, new)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        assert _get(self.store, key) == _get(self.model, key)

    @rule()
    def reopen(self) -> None:
        self.store.sync()
        self.store.close()
        self.store = FileStore(self.place)

    @rule(prefix=st.sampled_from(["a", "a/", "a/b", "a.", "h", "rank-00001/", "x"]))
    def list_some(self, prefix: str) -> None:
        assert sorted(self.store.keys(prefix)) == sorted(self.model.keys(prefix))

    @invariant()
    def same(self) -> None:
        keys = sorted(self.store.keys())
        assert keys == sorted(self.model.keys())
        assert [self.store.size(key) for key in keys] == [self.model.size(key) for key in keys]


def _get(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


def _set(store: Store, key: str, expected: bytes | None, new: bytes) -> object:
    try:
        store.compare_and_set(key, expected, new)
    except HeadMoved as moved:
        return moved.evidence["found"]
    return "set"


TestFilesAgainstTheModel = FilesAgainstTheModel.TestCase
TestFilesAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
