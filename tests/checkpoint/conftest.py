"""A small run: its key, its ranks, their states; chunks are tiny so that little data has many."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_sdk.checkpoint import Identity, Sizes, SnapshotFile, State, snapshot_directory
from resilient_sdk.checkpoint.testing import ArraySource, is_state, random_sources


class Run:
    """Makes the state of any rank and step, and the snapshot files that hold it."""

    run = "run-1"
    key = b"the key of run 1, secret"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.world_size = 2
        self.layout = {"frozen": 4096 * 2, "weight": 9_000, "bias": 50}

    def identity(self, rank: int) -> Identity:
        return Identity(self.run, rank, self.world_size, self.key)

    def snapshots(self, rank: int) -> SnapshotFile:
        return SnapshotFile(snapshot_directory(self.root, rank), sizes=Sizes(chunk=4096, block=1000))

    def state(self, rank: int, step: int, generation: int = 1) -> tuple[list[ArraySource], bytes]:
        sources = random_sources(generation * 10_000 + rank * 1000 + step, self.layout)
        sources[0].array[:] = rank  # never trained: its chunks are the same at every step
        return sources, b"rank %d step %d" % (rank, step)

    def capture(self, file: SnapshotFile, rank: int, step: int, generation: int = 1) -> None:
        sources, scalars = self.state(rank, step, generation)
        file.capture(step=step, generation=generation, sources=sources, scalars=scalars)

    def is_it(self, state: State, rank: int, step: int, generation: int = 1) -> bool:
        return is_state(state, *self.state(rank, step, generation))


@pytest.fixture
def run() -> Iterator[Run]:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield Run(root)
    shutil.rmtree(root)
