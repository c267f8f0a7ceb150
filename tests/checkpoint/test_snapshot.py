"""Snapshots: what comes back, what a kill or a flipped byte leaves, and who may overwrite what."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_sdk.checkpoint import Sizes, SnapshotFile
from resilient_sdk.checkpoint.slot import Slot
from resilient_sdk.checkpoint.testing import ArraySource, is_state, random_sources
from resilient_sdk.errors import (
    Corrupt,
    NewerFormat,
    NothingToRestore,
    StoreFull,
    StoreUnavailable,
)
from resilient_sdk.faults import Fault, FaultPlan, InjectedFault

SMALL = Sizes(chunk=4096, block=1000)
LAYOUT = {"weight": 10_000, "bias": 77, "empty": 0, "moment": 5_000}


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory / "rank"
    shutil.rmtree(directory)


def capture(file: SnapshotFile, step: int, *, generation: int = 1, faults: FaultPlan | None = None) -> None:
    sources, scalars = state(step, generation)
    file.capture(
        step=step,
        generation=generation,
        sources=sources,
        scalars=scalars,
        rank=0,
        faults=faults or FaultPlan(),
    )


def state(step: int, generation: int = 1) -> tuple[list[ArraySource], bytes]:
    return random_sources(step * 10 + generation, LAYOUT), b"scalars of step %d" % step


def holds(file: SnapshotFile, step: int, generation: int = 1) -> bool:
    return is_state(file.read(step), *state(step, generation))


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 30_000)), max_size=8),
    names=st.lists(st.text(max_size=20), min_size=8, max_size=8, unique=True),
    scalars=st.binary(max_size=5_000),
    limits=st.builds(
        Sizes, chunk=st.sampled_from([64, 4096, 5000]), block=st.sampled_from([33, 64, 1000, 10**6])
    ),
)
def test_what_was_captured_comes_back(
    sizes: list[int], names: list[str], scalars: bytes, limits: Sizes
) -> None:
    sources = random_sources(1, dict(zip(names, sizes, strict=False)))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        file = SnapshotFile(Path(place), sizes=limits)
        snapshot = file.capture(step=3, generation=2, sources=sources, scalars=scalars)
        assert is_state(file.read(3), sources, scalars)
        assert is_state(SnapshotFile(Path(place)).read(3), sources, scalars)
        pinned = file.pin(3)
        assert [place.offset % 64 for place in snapshot.table.arrays] == [0] * len(sources)
        hashes = [
            xxhash.xxh3_128_hexdigest(pinned.stream[p.offset :][: p.nbytes].data)
            for p in snapshot.table.pieces()
        ]
        assert hashes == list(snapshot.table.chunks)
        assert sum(piece.nbytes for piece in snapshot.table.pieces()) == snapshot.nbytes == len(pinned.stream)


def test_equal_states_have_equal_hashes_whatever_the_slot_held_before(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    dirty = [ArraySource("x", np.full(20_000, 255, np.uint8))]
    for step in range(3):
        file.capture(step=step, generation=1, sources=dirty, scalars=b"")
    first = file.capture(step=5, generation=1, sources=state(5)[0], scalars=b"s")
    other = SnapshotFile(place.with_name("other"), sizes=Sizes(chunk=4096, block=64))
    second = other.capture(step=5, generation=1, sources=state(5)[0], scalars=b"s")
    assert first.table == second.table, "padding between arrays is zero"


def test_two_steps_stay_newest_first(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    assert file.steps() == ()
    assert file.newest() is None
    for step in range(1, 6):
        capture(file, step)
        assert file.steps() == tuple(range(step, max(step - 2, 0), -1))
        assert file.newest() == step
        assert all(holds(file, kept) for kept in file.steps())
    assert sorted(path.name for path in place.iterdir()) == ["slot-0", "slot-1"], "the third is not needed"


def test_a_snapshot_does_not_alias_the_source(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    sources, scalars = state(1)
    file.capture(step=1, generation=1, sources=sources, scalars=scalars)
    for source in sources:
        source.array[:] = 0
    assert holds(file, 1)
    with pytest.raises(ValueError, match="read-only"):
        file.read(1).arrays["bias"][0] = 1


def test_it_outlives_its_owner_and_is_private(place: Path) -> None:
    capture(SnapshotFile(place, sizes=SMALL), 7)
    file = SnapshotFile(place)
    assert file.steps() == (7,)
    assert holds(file, 7)
    assert place.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in place.iterdir())
    held = file.read(7)
    file.close()
    assert is_state(held, *state(7)), "a state outlives the file's close"
    file.remove()
    assert not place.exists()


def test_states_of_changing_size(place: Path) -> None:
    file = SnapshotFile(place)
    for step, nbytes in enumerate([10, 3_000_000, 0, 1_000_000, 8_000_000, 5]):
        sources = random_sources(step, {"x": nbytes})
        file.capture(step=step, generation=1, sources=sources, scalars=b"s" * step)
        assert is_state(file.read(step), sources, b"s" * step)
        assert is_state(SnapshotFile(place).read(step), sources, b"s" * step)


def test_a_reader_that_opened_early_sees_a_file_that_grew(place: Path) -> None:
    file = SnapshotFile(place)
    file.capture(step=1, generation=1, sources=random_sources(1, {"x": 10}), scalars=b"")
    reader = SnapshotFile(place)
    assert reader.steps() == (1,)
    for step in (2, 3):
        file.capture(step=step, generation=1, sources=random_sources(step, {"x": 3_000_000}), scalars=b"")
    assert is_state(reader.read(3), random_sources(3, {"x": 3_000_000}), b"")


KILLED = """
import sys
from pathlib import Path
from resilient_sdk.checkpoint import Sizes, SnapshotFile
from resilient_sdk.checkpoint.testing import random_sources
from resilient_sdk.faults import Fault, FaultPlan
plan = FaultPlan((Fault("capture", rank=0, step=3),))
file = SnapshotFile(Path(sys.argv[1]), sizes=Sizes(4096, 1000))
layout = {"weight": 10_000, "bias": 77, "empty": 0, "moment": 5_000}
for step in range(1, 5):
    file.capture(step=step, generation=1, sources=random_sources(step * 10 + 1, layout),
                 scalars=b"scalars of step %d" % step, rank=0, faults=plan)
"""


def test_sigkill_in_the_middle_of_a_capture_leaves_the_step_before(place: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
    assert killed.returncode == -signal.SIGKILL
    file = SnapshotFile(place, sizes=SMALL)
    assert file.steps() == (2,), "step 1's slot was being overwritten, step 3 is incomplete"
    assert holds(file, 2)
    with pytest.raises(NothingToRestore):
        file.read(3)
    capture(file, 3)
    assert file.steps() == (3, 2)


ANYWHERE = """
import os, sys, threading
from pathlib import Path
from resilient_sdk.checkpoint import Sizes, SnapshotFile
from resilient_sdk.checkpoint.testing import random_sources
file = SnapshotFile(Path(sys.argv[1]), sizes=Sizes(4096, 1000))
layout = {"weight": 10_000, "bias": 77, "empty": 0, "moment": 5_000}
states = [random_sources(step * 10 + 1, layout) for step in range(100)]
print("ready", flush=True)
for step in range(1, 10**9):
    file.capture(step=step, generation=1, sources=states[step % 100], scalars=b"%d" % (step % 100))
"""


def test_sigkill_at_any_moment_leaves_a_whole_step(place: Path) -> None:
    for turn in range(8):
        command = [sys.executable, "-c", ANYWHERE, str(place)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(0.02 + 0.003 * turn)
            except subprocess.TimeoutExpired:
                process.kill()
        file = SnapshotFile(place, sizes=SMALL)
        steps = file.steps()
        assert len(steps) >= 1
        assert steps == tuple(range(steps[0], steps[0] - len(steps), -1))
        for step in steps:
            expected = random_sources(step % 100 * 10 + 1, LAYOUT)
            assert is_state(file.read(step), expected, b"%d" % (step % 100))
        file.remove()


def test_a_source_that_raises_costs_only_its_own_step(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 1)
    capture(file, 2)
    with pytest.raises(InjectedFault):
        capture(file, 3, faults=FaultPlan((Fault("capture", action="raise"),)))
    assert file.steps() == (2,)
    capture(file, 3)
    assert file.steps() == (3, 2)


def test_the_fault_point_strikes_half_way_once(place: Path) -> None:
    struck: list[int] = []

    class Plan(FaultPlan):
        def point(self, name: str, *, rank: int | None, step: int = 0) -> None:
            assert (name, rank) == ("capture", 0)
            struck.append(step)

    file = SnapshotFile(place, sizes=SMALL)
    for step in range(1, 4):
        capture(file, step, faults=Plan())
    file.capture(step=4, generation=1, sources=[], scalars=b"", rank=0, faults=Plan())
    assert struck == [1, 2, 3, 4]


def test_two_sources_of_one_name_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="same name"):
        SnapshotFile(place).capture(
            step=1, generation=1, sources=random_sources(1, {"a": 1}) * 2, scalars=b""
        )


PARTS = (
    "magic",
    "step",
    "generation",
    "table's hash",
    "header's hash",
    "table",
    "first byte",
    "last byte",
    "padding",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_found(place: Path, part: str) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 1)
    capture(file, 2)
    nbytes = file.complete()[0].nbytes
    offsets = {
        "magic": 3, "step": 16, "generation": 24, "table's hash": 50, "header's hash": 70,
        "table": 4096 + -(-nbytes // 64) * 64 + 100,
        "first byte": 4096, "last byte": 4096 + nbytes - 1, "padding": 4096 + 10_000 + 1,
    }  # fmt: skip
    flip(place / "slot-1", offsets[part])
    again = SnapshotFile(place)
    assert again.steps() == (1,)
    assert holds(again, 1)
    with pytest.raises((Corrupt, NothingToRestore)):
        again.read(2)
    with pytest.raises((Corrupt, NothingToRestore)):
        file.read(2)  # also by the process that captured it


def test_corruption_says_where(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 4)
    flip(place / "slot-0", 4096 + 4096 * 2 + 5)
    with pytest.raises(Corrupt) as caught:
        file.read(4)
    assert (caught.value.evidence["step"], caught.value.evidence["chunk"]) == (4, 2)


def test_a_truncated_or_foreign_file_is_no_snapshot(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 1)
    capture(file, 2)
    file.close()
    os.truncate(place / "slot-1", 8192)
    (place / "slot-2").write_bytes(b"hello")
    file = SnapshotFile(place, sizes=SMALL)
    assert file.steps() == (1,)
    for step in (3, 4, 5):
        capture(file, step)
    assert file.steps() == (5, 4, 3)  # a slot that exists is used before it is left alone


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_a_newer_format_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_sdk.checkpoint.slot.FORMAT", 7)
    capture(SnapshotFile(place), 1)
    monkeypatch.undo()
    with pytest.raises(NewerFormat, match=r"format 7, this version reads up to 1"):
        SnapshotFile(place)


def test_forget_after_a_rollback(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 4)
    capture(file, 5)
    file.forget_after(4)
    assert file.steps() == (4,)
    assert SnapshotFile(place).steps() == (4,)
    capture(file, 5, generation=2)
    assert holds(file, 5, generation=2)
    file.forget_after(0)
    assert file.steps() == ()


def test_a_lower_step_of_a_later_generation_is_the_newer_one(place: Path) -> None:
    file = SnapshotFile(place, sizes=SMALL)
    capture(file, 8)
    capture(file, 9)
    capture(file, 5, generation=2)
    assert file.newest() == 5
    capture(file, 6, generation=2)
    assert file.steps() == (6, 5)


def test_a_full_memory_is_an_error_with_a_fix(tmp_path: Path) -> None:
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs rights that this process has not")
    file = SnapshotFile(place / "rank")
    try:
        file.capture(step=1, generation=1, sources=random_sources(1, {"x": 300_000}), scalars=b"")
        with pytest.raises(StoreFull, match=r"No space left.*enlarge /dev/shm"):
            file.capture(step=2, generation=1, sources=random_sources(2, {"x": 3_000_000}), scalars=b"")
        assert file.steps() == (1,)
    finally:
        del file
        subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S607


def test_a_full_memory_simulated(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = SnapshotFile(place)
    capture(file, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFull, match="enlarge /dev/shm"):
        capture(file, 2)
    assert file.steps() == (1,)
    with pytest.raises(StoreFull, match="enlarge /dev/shm"):
        capture(file, 2)


def test_a_strangers_directory_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(StoreUnavailable, match="belongs to user"):
        SnapshotFile(place)


def test_a_slot_behind_a_link_is_refused(place: Path) -> None:
    place.mkdir()
    (place / "elsewhere").write_bytes(bytes(5000))
    (place / "slot-0").symlink_to(place / "elsewhere")
    with pytest.raises(StoreUnavailable):
        Slot(place / "slot-0").header()
