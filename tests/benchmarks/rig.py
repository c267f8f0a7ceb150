"""What the benchmarks stand on: a place of their own that is removed again, torchrun, and waiting."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from resilient_sdk.runtime.run import Run
from tests.benchmarks.work import Work

T = TypeVar("T")
LIMIT_S = 300.0
POLL_S = 0.005
PLAIN = Path(__file__).with_name("plain.py")


class Bench:
    """One benchmark's place: `out` on disk, `memory` in shared memory, both gone at its end."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.root = root
        self.memory = memory

    def out(self, name: str) -> Path:
        """A fresh folder for a side's marks."""
        path = self.root / name
        path.mkdir()
        return path


@contextmanager
def bench(name: str) -> Iterator[Bench]:
    """Runs of ours inside go to this place; whatever is left of them at the end is told.

    Raises:
        RuntimeError: shared memory was left behind.
    """
    root = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
    memory = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir="/dev/shm"))
    before = {key: os.environ.get(key) for key in ("RESILIENT_HOME", "RESILIENT_MEMORY")}
    os.environ.update(RESILIENT_HOME=str(root / "home"), RESILIENT_MEMORY=str(memory))
    try:
        yield Bench(root, memory)
        left = [path.name for path in memory.iterdir() if path.name.startswith("resilient-")]
        if left:
            raise RuntimeError(f"left in shared memory: {', '.join(left)}")
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def wait_for(what: str, look: Callable[[], T | None], limit_s: float = LIMIT_S, poll_s: float = POLL_S) -> T:
    """Looks until it finds something true.

    Raises:
        TimeoutError: it never came.
    """
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {limit_s:g} s")
        time.sleep(poll_s)
    return found


def kill(pid: int) -> float:
    """SIGKILL from outside. Returns when, in monotonic seconds."""
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


@contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Stops the run at the end, whatever happens."""
    try:
        yield run
    finally:
        run.stop()


@contextmanager
def torchrun(work: Work, *, nproc: int, restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """The plain side under torchrun, ended with all its processes; its output goes to `out`/log."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # as a run of ours has it
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}",
               f"--max-restarts={restarts}", str(PLAIN), json.dumps(asdict(work))]  # fmt: skip
    with (Path(work.out) / "log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        finally:
            _end_group(process.pid)


def _end_group(group: int) -> None:
    # torchrun starts its workers in sessions of their own or in its; what is left of its own goes here.
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
