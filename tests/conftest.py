"""Fixtures for all tests."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def processes_of(root: Path) -> list[str]:
    """Command lines of living processes that name `root`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(root) in line and state != "Z":
                found.append(f"{entry.name}: {line}")
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for runs of its own; at the end nothing of them may be left."""
    root = tmp_path / "runs-home"
    memory = Path("/dev/shm") / f"resilient-test-{os.getpid()}-{time.monotonic_ns()}"
    memory.mkdir(mode=0o700)
    monkeypatch.setenv("RESILIENT_HOME", str(root))
    monkeypatch.setenv("RESILIENT_MEMORY", str(memory))
    yield root
    left = processes_of(root)
    files = list(memory.iterdir())
    shutil.rmtree(memory)
    assert left == []
    assert files == []
