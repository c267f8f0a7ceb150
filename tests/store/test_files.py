"""What only files can get wrong: killed writers, full disks, strangers' directories, other processes."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_sdk.errors import HeadMoved, NotFound, StoreFull, StoreUnavailable
from resilient_sdk.store import FileStore
from resilient_sdk.store.wrappers import FaultyStore, SlowStore


class FakeClock:
    """Time that moves only by sleeping."""

    def __init__(self, wall: float = 0.0) -> None:
        self.now = wall

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def _everything(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from resilient_sdk.store import FileStore
store = FileStore(Path(sys.argv[1]))
write = os.write
def half(file, data):
    write(file, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = half
store.put("a/k", b"new value")
"""


def test_what_a_killed_writer_leaves_is_invisible_and_swept_when_old(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a/k", b"old")
    writer = _python(KILLED_WRITER, tmp_path)
    writer.communicate()
    assert writer.returncode == -9
    assert store.get("a/k") == b"old"
    assert list(store.keys()) == ["a/k"]
    leftovers = [path for path in _everything(tmp_path) if path.name.startswith("~")]
    assert [path.read_bytes() for path in leftovers] == [b"new "]
    FileStore(tmp_path)
    assert leftovers[0].exists(), "a young one may belong to a writer that lives"
    FileStore(tmp_path, clock=FakeClock(leftovers[0].stat().st_mtime + 3700))
    assert not leftovers[0].exists()
    assert store.get("a/k") == b"old"


def test_the_sweep_leaves_strangers_files_alone(tmp_path: Path) -> None:
    for name in ("~document.tmp", "~$letter.docx", "notes"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "~1-00000000-0").write_text("mine")
    FileStore(tmp_path, clock=FakeClock(4e9))
    assert len(_everything(tmp_path)) == 4


RACER = """
import sys
from pathlib import Path
from resilient_sdk.errors import HeadMoved
from resilient_sdk.store import FileStore
store = FileStore(Path(sys.argv[1]))
won = 0
print("ready", flush=True)
sys.stdin.readline()
while won < 100:
    found = store.get("head")
    try:
        store.compare_and_set("head", found, str(int(found) + 1).encode())
    except HeadMoved:
        continue
    won += 1
"""


def test_two_processes_race_and_no_increment_is_lost(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.compare_and_set("head", None, b"0")
    racers = [_python(RACER, tmp_path) for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.communicate("go\n")
        assert racer.returncode == 0
    assert store.get("head") == b"200"


HOLDER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_stopped_holder_of_the_lock_is_not_waited_for_forever(tmp_path: Path) -> None:
    store = FileStore(tmp_path, clock=FakeClock())
    holder = _python(HOLDER, tmp_path / "~lock")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(StoreUnavailable, match="stays locked"):
        store.compare_and_set("head", None, b"1")
    holder.kill()
    holder.communicate()
    store.compare_and_set("head", None, b"1")


def test_nobody_else_can_read(tmp_path: Path) -> None:
    place = tmp_path / "store"
    FileStore(place).put("a/b/c", b"secret")
    FileStore(place).compare_and_set("head", None, b"")
    for path in (place, *place.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_strangers_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(StoreUnavailable, match=r"belongs to user .* give a directory of your own") as caught:
        FileStore(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailable, match="cannot use"):
            FileStore(place)


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulated at the boundary: the tests may run as root, whom no permission stops.
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailable, match=r"cannot write .*Read-only file system.* give a writable"):
        FileStore(tmp_path)


def test_a_store_that_was_unmounted_is_not_an_empty_one(tmp_path: Path) -> None:
    place = tmp_path / "store"
    store = FileStore(place)
    place.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match="is gone"):
        store.get("a/b")
    with pytest.raises(StoreUnavailable, match="is gone"):
        list(store.keys())
    with pytest.raises(StoreUnavailable):
        store.put("a/b", b"1")
    assert not place.exists()


def test_a_full_disk_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("k", b"old")
    real = os.write

    def half_then_full(file: int, data: memoryview) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(StoreFull, match="No space left"):
        store.put("k", b"much longer than before")
    monkeypatch.undo()
    assert store.get("k") == b"old"
    assert [path.name for path in _everything(tmp_path)] == ["k"], "a failed put leaves nothing"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs rights that this process has not")
    yield place
    subprocess.run(["umount", str(place)], check=True)  # noqa: S607


def test_a_full_disk_and_its_recovery(tiny_disk: Path) -> None:
    store = FileStore(tiny_disk)
    store.put("small", b"s")
    with pytest.raises(StoreFull):
        store.put("large", bytes(2 << 20))
    with pytest.raises(NotFound):
        store.get("large")
    assert list(store.keys()) == ["small"]
    store.put("large", bytes(1 << 19))
    with pytest.raises(HeadMoved):
        store.compare_and_set("small", None, b"")


def test_sync_covers_what_others_put_and_syncs_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def watch(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", watch)
    store = FileStore(tmp_path / "s")
    FileStore(tmp_path / "s").put("a/k", b"1")
    store.sync()
    assert sorted(synced) == ["a+", "k", "s"]
    synced.clear()
    store.put("a/k", b"2")
    store.put("a/l", b"2")
    store.sync()
    store.sync()
    assert sorted(name for name in synced if name in "kl") == ["k", "l"]


def test_the_wrappers_slow_down_and_fail(tmp_path: Path) -> None:
    clock = FakeClock()
    faulty = FaultyStore(SlowStore(FileStore(tmp_path), 2.0, clock), calls=2)
    faulty.put("a", b"")
    assert clock.now == 2.0
    assert faulty.get("a") == b""
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="injected"):
            faulty.size("a")
    assert faulty.made == 4
