"""A store in a directory: one file a value.

    DIRECTORY/rank-00001+/chunks+/0f3c…     a folder's name ends in "+": a key may also be another's folder
    DIRECTORY/rank-00001+/chunks+/~…        a value that is being written; never listed
    DIRECTORY/~lock                         serialises compare_and_set

Neither "+" nor "~" can occur in a key.
"""

import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilient_sdk.clock import SYSTEM_CLOCK, Clock
from resilient_sdk.errors import HeadMoved, NotFound, StoreError, StoreUnavailable
from resilient_sdk.store.base import BytesLike, Store, check_key, flat, split_prefix
from resilient_sdk.store.directories import io_errors, own_directory

_TEMPORARY = re.compile(r"~[0-9]+-[0-9a-f]{8}-[0-9]+")
_OLD_SECONDS = 3600.0
_LOCK_SECONDS = 10.0
_LOCK_POLL_SECONDS = 0.002


class FileStore(Store):
    """Values as files of one directory, shared by all processes that open it.

    A value is written beside its place and renamed, so it survives the death of every process the moment
    `put` returns; it is *not* forced to the disk then (a step would wait for the disk): `sync` does that. The
    directory must lie on a file system with atomic rename and flock: a local disk or /dev/shm, or NFS version
    4.

    Opening raises StoreUnavailable for a directory that cannot be written or is another user's. It removes
    what killed writers left, once that is an hour old: younger ones may belong to a writer that lives.
    """

    def __init__(self, directory: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._root = directory.absolute()
        self._clock = clock
        # The random part tells this object from one of another node whose process has the same number.
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._synced: dict[Path, tuple[int, int]] = {}
        own_directory(self._root)
        self._probe()
        self._sweep()

    def put(self, key: str, value: BytesLike) -> None:
        path = self._path(key)
        with io_errors(f"cannot store {key} in {self._root}"):
            self._replace(path, flat(value))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with io_errors(f"cannot read {key} from {self._root}"), self._absence(key):
            return path.read_bytes()

    def delete(self, key: str) -> None:
        path = self._path(key)
        with io_errors(f"cannot delete {key} from {self._root}"):
            path.unlink(missing_ok=True)

    def keys(self, prefix: str = "") -> Iterator[str]:
        folder, rest = split_prefix(prefix)
        start = self._folder(folder.split("/") if folder else [])
        return self._walk(start, f"{folder}/" if folder else "", rest)

    def size(self, key: str) -> int:
        path = self._path(key)
        with io_errors(f"cannot read {key} from {self._root}"), self._absence(key):
            return path.stat().st_size

    def compare_and_set(self, key: str, expected: bytes | None, new: bytes) -> None:
        path = self._path(key)
        with io_errors(f"cannot set {key} in {self._root}"), self._locked():
            found = path.read_bytes() if path.exists() else None
            if found != expected:
                raise HeadMoved(f"{key} holds another value than the one expected", key=key, found=found)
            self._replace(path, memoryview(new))

    def sync(self) -> None:
        """Forces every value and folder of the directory to the disk, also those that other processes put:
        the one who commits is not the one who wrote. Files that this object has synced before are passed
        over."""
        synced: dict[Path, tuple[int, int]] = {}
        with io_errors(f"cannot sync {self._root}"):
            for folder, _, names in os.walk(self._root):
                for path in (Path(folder, name) for name in names if not name.startswith("~")):
                    self._sync_file(path, synced)
                _fsync(Path(folder))
        self._synced = synced

    def _sync_file(self, path: Path, synced: dict[Path, tuple[int, int]]) -> None:
        with suppress(FileNotFoundError):  # deleted since it was listed
            found = path.stat()
            identity = (found.st_ino, found.st_ctime_ns)
            if self._synced.get(path) != identity:
                _fsync(path)
            synced[path] = identity

    def _path(self, key: str) -> Path:
        *folders, name = check_key(key).split("/")
        return self._folder(folders) / name

    def _folder(self, segments: list[str]) -> Path:
        return self._root.joinpath(*(f"{segment}+" for segment in segments))

    def _replace(self, path: Path, value: memoryview) -> None:
        temporary = path.with_name(f"~{self._mark}-{next(self._numbers)}")
        try:
            self._write(temporary, value)
            temporary.replace(path)
        except BaseException:
            # A full disk stays full if each failed put leaves its half behind.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _write(self, path: Path, value: memoryview) -> None:
        file = self._create(path)
        try:
            while value:
                value = value[os.write(file, value) :]
        finally:
            os.close(file)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._make_folders(path.parent)
            return os.open(path, flags, 0o600)

    def _make_folders(self, folder: Path) -> None:
        # The root is not made again: a directory that was removed or unmounted must not come back empty.
        for part in reversed([folder, *folder.parents]):
            if part.is_relative_to(self._root) and part != self._root:
                part.mkdir(mode=0o700, exist_ok=True)

    def _walk(self, folder: Path, name: str, rest: str) -> Iterator[str]:
        for entry in self._entries(folder):
            if not entry.startswith(rest) or entry.startswith("~"):
                continue
            if entry.endswith("+"):
                yield from self._walk(folder / entry, f"{name}{entry[:-1]}/", "")
            elif _is_key(name + entry):
                yield name + entry

    def _entries(self, folder: Path) -> list[str]:
        with io_errors(f"cannot list {self._root}"):
            try:
                return os.listdir(folder)  # noqa: PTH208 - names, not paths
            except FileNotFoundError:
                self._require_root()
                return []

    @contextmanager
    def _absence(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._require_root()
            raise NotFound(f"{self._root} has no {key}", key=key) from None

    def _require_root(self) -> None:
        # Without this a store that was unmounted reads as one that is empty.
        if not self._root.is_dir():
            raise StoreUnavailable(f"{self._root} is gone", fix="mount it or make it again")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._root / "~lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._acquire(file)
            yield
        finally:
            os.close(file)  # gives the lock up, as the death of the process would

    def _acquire(self, file: int) -> None:
        # Bounded: a holder that was stopped (SIGSTOP, a frozen container) must not hang every other rank.
        deadline = self._clock.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"{self._root} stays locked", fix="look for a stopped process"
                    ) from None
                self._clock.sleep(_LOCK_POLL_SECONDS)
            else:
                return

    def _probe(self) -> None:
        # os.access lies about read-only mounts and to root; only a write tells.
        probe = self._root / f"~{self._mark}-{next(self._numbers)}"
        with io_errors(f"cannot write to {self._root}", fix="give a writable directory"):
            self._write(probe, memoryview(b"probe"))
            probe.unlink()

    def _sweep(self) -> None:
        with io_errors(f"cannot list {self._root}"):
            for folder, folders, names in os.walk(self._root):
                folders[:] = [name for name in folders if name.endswith("+")]
                for path in (Path(folder, name) for name in names if _TEMPORARY.fullmatch(name)):
                    self._remove_if_old(path)

    def _remove_if_old(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # its writer has just renamed it
            if self._clock.wall() - path.stat().st_mtime > _OLD_SECONDS:
                path.unlink()


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except StoreError:
        return False
    return True


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
