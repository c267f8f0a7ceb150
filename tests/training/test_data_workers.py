"""DataLoader workers: the same samples as without them, and nothing left behind however the rank ends."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.training.data import EndOfData, Feed, open_feed
from resilient_sdk.training.rng import capture_rng, restore_rng, seed_everything


class Noisy(Dataset[Any]):
    def __init__(self, slow: float = 0) -> None:
        self.slow = slow
        self.mark = 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        SYSTEM_CLOCK.sleep(random.random() * self.slow)
        return index, random.random(), float(np.random.random()), torch.rand(2), self.mark


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        for number in range(10):
            yield (info.id if info else 0), number, torch.rand(1), random.random()


def opened(loader: Any, *, epochs: int | None = None) -> Feed:
    return open_feed(loader, rank=0, world_size=1, micro_batch_size=2, seed=5, epochs=epochs)


def loader(workers: int, dataset: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Noisy(), batch_size=3, shuffle=True, num_workers=workers, **more)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def drawn(feed: Feed, count: int) -> list[Any]:
    return [plain(feed.draw()) for _ in range(count)]


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [each for each in children if each.name() == "pt_data_worker" and each.status() != "zombie"]


def mark(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "more", [{}, {"persistent_workers": True}, {"prefetch_factor": 5}, {"in_order": False}]
)
def test_workers_change_nothing_and_prefetch_is_not_position(more: dict[str, Any]) -> None:
    reference = opened(loader(0))
    feed = opened(loader(2, Noisy(slow=0.005), **more))
    start = feed.position()
    slept = opened(loader(0, Noisy(slow=1e-9)))  # the same draws of random numbers as the slow one
    expected = drawn(slept, 20)
    assert feed.position() == reference.position()
    first = drawn(feed, 9)
    assert first == expected[:9]
    middle = feed.position()
    assert json.loads(middle)["at"] == 27
    for _ in range(3):
        feed.seek(start)
        assert drawn(feed, 2) == expected[:2]
        assert json.loads(feed.position())["at"] == 6
        feed.seek(middle)
        assert drawn(feed, 6) == expected[9:15]
    feed.close()
    assert workers_of(os.getpid()) == []
    feed.seek(middle)  # a closed feed can be used again
    assert drawn(feed, 1) == expected[9:10]
    feed.close()
    feed.close()


def test_workers_do_not_move_training_numbers() -> None:
    feed = opened(loader(2))
    start = feed.position()
    seed_everything(4)
    before = capture_rng()
    expected = (random.random(), np.random.random(), torch.rand(1).item())
    restore_rng(before)
    drawn(feed, 10)
    feed.seek(start)
    drawn(feed, 1)
    feed.close()
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def test_iterable_datasets_with_workers_are_replayed() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=3, num_workers=2, persistent_workers=True)

    feed = opened(make())
    positions, batches = [], []
    for _ in range(11):  # 8 batches an epoch
        positions.append(feed.position())
        batches.append(plain(feed.draw()))
    feed.close()
    seed_everything(3)
    other = opened(make())
    for start in (9, 2, 7):
        other.seek(positions[start])
        assert drawn(other, 2) == batches[start : start + 2]
    other.close()
    assert workers_of(os.getpid()) == []


def test_the_end_leaves_no_worker() -> None:
    feed = opened(loader(2), epochs=1)
    drawn(feed, 7)
    with pytest.raises(EndOfData):
        feed.draw()
    assert workers_of(os.getpid()) == []


def test_a_killed_worker_is_an_error_and_the_batch_is_served_next_time() -> None:
    expected = drawn(opened(loader(0, Noisy(slow=1e-9))), 4)
    feed = opened(loader(2, Noisy(slow=0.05)))
    assert drawn(feed, 2) == expected[:2]
    for worker in workers_of(os.getpid()):
        worker.kill()
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        drawn(feed, 9)
    feed.seek(opened(loader(0)).position())
    assert drawn(feed, 4) == expected
    feed.close()


def test_a_failing_sample_raises_and_raises_again() -> None:
    class Bad(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"no sample {index}")

    feed = opened(DataLoader(Bad(), num_workers=1))
    for _ in range(2):
        with pytest.raises(OSError, match="no sample 0"):
            feed.draw()
    assert workers_of(os.getpid()) == []


def test_the_users_worker_init_fn_runs_on_the_users_dataset() -> None:
    feed = opened(loader(1, worker_init_fn=mark))
    assert feed.draw()[4].tolist() == [7, 7, 7]
    feed.close()


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_other_ways_to_start_workers(context: str) -> None:
    feed = opened(loader(1, multiprocessing_context=context))
    assert drawn(feed, 3) == drawn(opened(loader(0)), 3)
    feed.close()


def test_workers_hold_no_connection_of_the_rank_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    with rank, peer:
        peer.settimeout(5)
        feed = opened(loader(2))
        drawn(feed, 1)
        assert len(workers_of(os.getpid())) == 2
        rank.close()
        assert peer.recv(1) == b""  # a worker that held it open would let the peer wait
        drawn(feed, 3)
        feed.close()


RANK = """
import os, sys, time, torch
sys.path[:0] = sys.argv[2:]
from torch.utils.data import DataLoader
from resilient_sdk.training.data import open_feed
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index): time.sleep(0.01); return index
if __name__ == "__main__":
    loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1])
    feed = open_feed(loader, rank=0, world_size=1, micro_batch_size=2, seed=1, epochs=None)
    feed.draw()
    print("drawn", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_die_with_a_killed_rank(context: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with subprocess.Popen(
        [sys.executable, str(script), context, *sys.path], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "drawn\n"
        below = psutil.Process(rank.pid).children(recursive=True)
        assert len(below) >= 2
        rank.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=3)
        assert alive == []
