"""The port through which chunks, manifests and the head are kept. Its obligations are words here and tests
in `contract.py`.

    key       segments of [a-z0-9._-] joined by "/", none "." or ".."; at most 200 characters each, 512 in all
    value     bytes, from none to many megabytes; read whole or not at all
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient_sdk.errors import StoreError

BytesLike: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""What may be put: C-contiguous. A store reads it during the call only, and keeps no reference."""

_KEY = re.compile(r"[a-z0-9._-]{1,200}(/[a-z0-9._-]{1,200})*")
_KEY_LENGTH = 512


class Store(ABC):
    """Named values. Every method may be called from any thread and, unless an adapter says otherwise, from
    many processes at once.

    Raises only kinds of `StoreError`: `StoreUnavailable` (gone, not writable, I/O error), its kind
    `StoreFull`, `NotFound`, `HeadMoved`, and `StoreError` itself for a key outside the grammar. After
    `StoreUnavailable` what was being written is *unknown*: the old value or the new one, never a mixture;
    call it again.
    """

    @abstractmethod
    def put(self, key: str, value: BytesLike) -> None:
        """Sets the value. Atomic: a reader gets the old value or the new one whole, also if the writer is
        killed in the middle. Idempotent: may be repeated. A key that is compared and set is never put."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Returns the value. A deletion or another put during the call does not tear it. Raises NotFound."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the value; not an error where there is none, so that it may be repeated."""

    @abstractmethod
    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yields, in any order, each key that starts with the characters of `prefix`. What is put or deleted
        meanwhile may or may not appear; everything else appears once. Half-written values never do."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Returns the value's length in bytes. Raises NotFound."""

    @abstractmethod
    def compare_and_set(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Sets the value if the present one is `expected` (None: there is none). Of several callers that
        expect the same value exactly one succeeds. Raises HeadMoved with `evidence["found"]`, the value that
        was there (None: none); where that equals `new`, an earlier call whose answer was lost had
        succeeded."""

    @abstractmethod
    def sync(self) -> None:
        """Returns when every value put before, by whomever on this machine, survives a power loss. Until then
        a value need only survive the death of every process."""

    def close(self) -> None:  # noqa: B027 - many stores hold nothing
        """Frees what the object holds; the values stay. May be repeated; nothing else may be called after
        it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> str:
    """Returns `key`. Raises StoreError for one outside the grammar: it could climb out of the store."""
    if len(key) > _KEY_LENGTH or _KEY.fullmatch(key) is None or not {".", ".."}.isdisjoint(key.split("/")):
        raise StoreError(
            f"the key {key!r} is refused", fix="use segments of [a-z0-9._-] joined by /", key=key
        )
    return key


def split_prefix(prefix: str) -> tuple[str, str]:
    """Returns (folder, rest): `folder` is "" or a key, `rest` how the next segment starts. Raises
    StoreError."""
    folder, _, rest = prefix.rpartition("/")
    if folder or prefix.startswith("/"):
        check_key(folder)
    if rest not in ("", ".", ".."):
        check_key(rest)
    return folder, rest


def flat(value: BytesLike) -> memoryview:
    """Returns the bytes of `value` as a one-dimensional view; copies nothing."""
    view = value.data if isinstance(value, np.ndarray) else memoryview(value)
    # cast() refuses a view with a zero in its shape, which is what an empty array is.
    return view.cast("B") if view.nbytes else memoryview(b"")
