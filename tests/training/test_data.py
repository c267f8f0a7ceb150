"""The order of the data: every sample once, the same after any seek, and training's numbers untouched."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data import EndOfData, Feed, open_feed
from resilient_sdk.training.rng import capture_rng, restore_rng, seed_everything


class Numbers(Dataset[int]):
    """Its samples are their own indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Each sample is its index and a draw from every global generator."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), torch.rand(2)


class Several(Sampler[int]):
    """A user's own sampler: shorter in odd epochs, and random by torch's global generator."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(9 - self.epoch % 2).tolist())


class Batches(Sampler[list[int]]):
    """A user's own batch sampler, with batches of different sizes."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])


class Chunks(IterableDataset[int]):
    """An iterable dataset, random by the global generator."""

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            yield number * 100 + random.randrange(100)


class Lines:
    """A plain iterable that yields micro-batches; epoch by epoch another order."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(7 + self.epoch % 2):
            yield number, self.epoch, torch.rand(1)


def opened(loader: Any, *, rank: int = 0, world: int = 1, batch: int = 2, seed: int = 5, **more: Any) -> Feed:
    return open_feed(
        loader, rank=rank, world_size=world, micro_batch_size=batch, seed=seed, epochs=more.get("epochs")
    )


def plain(value: Any) -> Any:
    """A batch as something that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def drawn(feed: Feed, count: int) -> list[Any]:
    return [plain(feed.draw()) for _ in range(count)]


def rest(feed: Feed) -> list[Any]:
    batches = []
    while True:
        try:
            batches.append(plain(feed.draw()))
        except EndOfData:
            return batches


def indices(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch[1]]


def generator(count: int = 12) -> Iterator[Any]:
    for number in range(count):
        yield torch.tensor([float(number), torch.rand(1).item()])


LOADERS: dict[str, Callable[[], Any]] = {
    "dataset": lambda: Noisy(11),
    "list": lambda: list(range(11)),
    "shuffling loader": lambda: DataLoader(Noisy(11), batch_size=3, shuffle=True),
    "ordered loader": lambda: DataLoader(Noisy(11), batch_size=3),
    "subset": lambda: DataLoader(Subset(Noisy(20), range(4, 15)), batch_size=3, shuffle=True),
    "sampler": lambda: DataLoader(Noisy(9), batch_size=2, sampler=Several()),
    "weighted": lambda: DataLoader(
        Noisy(9), batch_size=2, sampler=WeightedRandomSampler([1.0] * 9, 9, generator=torch.Generator())
    ),
    "replacement": lambda: DataLoader(Noisy(9), sampler=RandomSampler(Noisy(9), replacement=True)),
    "batch sampler": lambda: DataLoader(Noisy(9), batch_sampler=Batches()),
    "no batches": lambda: DataLoader(Noisy(9), batch_size=None, shuffle=True),
    "iterable dataset": lambda: Chunks(),
    "iterable loader": lambda: DataLoader(Chunks(), batch_size=3),
    "iterable": Lines,
    "function of a dataset": lambda: lambda rank, world: Noisy(11 + rank + world),
    "function of a generator": lambda: lambda rank, world: generator(5 + rank + world),
}


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**64),
)
@settings(deadline=None)
def test_every_sample_once_an_epoch(count: int, batch: int, world: int, epochs: int, seed: int) -> None:
    whole = count * epochs // (batch * world)
    data = Numbers(count)
    if whole == 0:
        with pytest.raises(ConfigError, match="do not fill"):
            opened(data, batch=batch, world=world, epochs=epochs)
        return
    ranks = [
        rest(opened(data, rank=r, world=world, batch=batch, epochs=epochs, seed=seed)) for r in range(world)
    ]
    assert [len(batches) for batches in ranks] == [whole] * world
    served = [n for step in zip(*ranks, strict=True) for batch_of_rank in step for n in batch_of_rank[1]]
    assert all(len(batches[1]) == batch for batches in ranks[0])
    assert count * epochs - len(served) < batch * world
    for epoch in range(epochs):
        part = served[epoch * count : (epoch + 1) * count]
        assert len(set(part)) == len(part)
        assert len(part) == count or epoch == epochs - 1 or len(served) < (epoch + 1) * count


@given(data=st.data(), kind=st.sampled_from(sorted(LOADERS)), world=st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_resuming_anywhere_in_another_process_is_the_uninterrupted_order(
    data: st.DataObject, kind: str, world: int
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    whole = opened(LOADERS[kind](), rank=rank, world=world)
    seed_everything(data.draw(st.integers(0, 9)))  # whatever training's state is
    positions, batches = [], []
    for _ in range(12):
        positions.append(whole.position())
        batches.append(plain(whole.draw()))
    seed_everything(99)
    other = opened(LOADERS[kind](), rank=rank, world=world)
    for start in data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=4)):
        count = data.draw(st.integers(1, 12 - start))
        for feed in (whole, other):
            feed.seek(positions[start])
            assert feed.position() == positions[start]
            assert drawn(feed, count) == batches[start : start + count]


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_training_numbers_do_not_move(kind: str) -> None:
    feed = opened(LOADERS[kind]())
    seed_everything(4)
    before = capture_rng()
    expected = (random.random(), np.random.random(), torch.rand(1).item())
    restore_rng(before)
    drawn(feed, 9)
    feed.seek(opened(LOADERS[kind]()).position())
    drawn(feed, 2)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_a_failed_run_has_an_end_and_a_length(kind: str) -> None:
    feed = opened(LOADERS[kind](), epochs=2)
    batches = rest(feed)
    assert feed.length is None or len(batches) // 2 <= feed.length <= len(batches)
    with pytest.raises(EndOfData):
        feed.draw()
    end = feed.position()
    feed.seek(opened(LOADERS[kind]()).position())
    assert rest(feed) == batches
    feed.seek(end)
    assert rest(feed) == []
    assert feed.guarantee.endswith(".")
    assert "\n" not in feed.guarantee


@pytest.mark.parametrize("kind", ["shuffling loader", "dataset", "iterable", "sampler"])
def test_the_seed_decides(kind: str) -> None:
    first, same, other = (drawn(opened(LOADERS[kind](), seed=seed), 8) for seed in (1, 1, 2))
    assert first == same != other


def test_shuffles_only_what_shuffled() -> None:
    ordered = opened(DataLoader(Numbers(6), batch_size=3, drop_last=True))
    assert indices(drawn(ordered, 4)) == [*range(6), *range(6)]
    shuffled = indices(drawn(opened(DataLoader(Numbers(40), batch_size=4, shuffle=True)), 20))
    assert shuffled[:40] != shuffled[40:]
    assert sorted(shuffled[:40]) == sorted(shuffled[40:]) == list(range(40))


def test_a_batch_crosses_two_epochs() -> None:
    feed = opened(DataLoader(Numbers(5), batch_size=3), epochs=2)
    assert [batch[1] for batch in rest(feed)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_ranks_share_a_custom_sampler() -> None:
    ranks = [opened(DataLoader(Numbers(9), batch_size=2, sampler=Several()), rank=r, world=2) for r in (0, 1)]
    steps = [drawn(feed, 4) for feed in ranks]
    served = [n for step in zip(*steps, strict=True) for batch in step for n in batch[1]]
    assert sorted(served[:9]) == list(range(9))
    assert sorted(served[9:]) == [n for n in range(8) if n in served[9:]]


def test_batches_of_a_batch_sampler_go_to_ranks_in_turn() -> None:
    steps = [
        drawn(opened(DataLoader(Numbers(9), batch_sampler=Batches()), rank=r, world=2), 5) for r in (0, 1)
    ]
    served = [batch[1] for step in zip(*steps, strict=True) for batch in step]
    assert served == [*Batches(), *Batches()]


def test_a_distributed_sampler_is_not_striped_twice() -> None:
    data = Numbers(24)
    served: Counter[int] = Counter()
    for rank in range(3):
        sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=3, rank=rank)
        feed = opened(DataLoader(data, batch_size=4, sampler=sampler), rank=rank, world=3, epochs=1)
        served.update(indices(rest(feed)))
    assert served == Counter(range(24))


def test_what_a_function_makes_is_not_striped() -> None:
    def make(rank: int, world: int) -> DataLoader[int]:
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(24), num_replicas=world, rank=rank)
        return DataLoader(Numbers(24), batch_size=4, sampler=sampler)

    ranks = [indices(rest(opened(make, rank=rank, world=3, epochs=1))) for rank in range(3)]
    assert Counter(n for served in ranks for n in served) == Counter(range(24))
    generated = opened(lambda rank, _: (rank * 10 + n for n in range(3)), rank=1, world=2, epochs=1)
    assert rest(generated) == [10, 11, 12]


def test_iterables_go_to_ranks_in_turn_and_leave_only_the_last_out() -> None:
    def seven() -> Any:
        return type("Seven", (), {"__iter__": lambda _: iter(range(7))})()

    ranks = [rest(opened(seven(), rank=rank, world=3, epochs=2)) for rank in range(3)]
    served = [n for step in zip(*ranks, strict=True) for n in step]
    assert served == [*range(7), *range(5)]


def test_a_sample_does_not_depend_on_batch_or_world_size() -> None:
    data = Noisy(12)
    alone = opened(data, batch=1)
    samples = [[part[0] for part in (batch[0][1], batch[1][1], batch[3][1])] for batch in drawn(alone, 12)]
    feeds = [opened(data, batch=3, rank=rank, world=2) for rank in (0, 1)]
    spread = []
    for batch in (plain(feed.draw()) for _ in range(2) for feed in feeds):
        spread += [list(parts) for parts in zip(batch[0][1], batch[1][1], batch[3][1], strict=True)]
    assert spread == samples


def test_a_run_can_go_on_with_another_world_size() -> None:
    feeds = [opened(Numbers(24), rank=rank, world=3) for rank in range(3)]
    served = [n for feed in feeds for n in indices(drawn(feed, 2))]
    fewer = [opened(Numbers(24), rank=rank, world=2) for rank in range(2)]
    for feed in fewer:
        feed.seek(feeds[0].position())
    served += [n for feed in fewer for n in indices(drawn(feed, 3))]
    assert sorted(served) == list(range(24))


def test_random_collate_functions_are_replayed() -> None:
    def masking(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples))

    def loader() -> DataLoader[int]:
        return DataLoader(Numbers(10), batch_size=2, collate_fn=masking, shuffle=True)

    feed = opened(loader())
    batches = drawn(feed, 5)
    again = opened(loader())
    again.seek(feed.position())
    assert drawn(again, 2) == drawn(feed, 2)
    again.seek(opened(loader()).position())
    assert drawn(again, 5) == batches


def test_a_collate_function_does_not_depend_on_what_samples_drew() -> None:
    class Caching(Numbers):
        def __init__(self) -> None:
            super().__init__(10)
            self.known: set[int] = set()

        def __getitem__(self, index: int) -> int:
            if index not in self.known:
                self.known.add(index)
                random.random()
                torch.rand(1)
            return index

    def masking(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples)) + random.random()

    feed = opened(DataLoader(Caching(), batch_size=2, collate_fn=masking))
    start = feed.position()
    first = drawn(feed, 5)
    feed.seek(start)
    assert drawn(feed, 5) == first


def test_a_dataset_that_fetches_at_once_is_asked_at_once() -> None:
    class AtOnce(Numbers):
        def __getitems__(self, wanted: list[int]) -> list[Any]:
            return [(len(wanted), index, random.random()) for index in wanted]

    feed = opened(AtOnce(8), batch=4)
    start = feed.position()
    batches = drawn(feed, 4)
    assert batches[0][0][1] == [4, 4, 4, 4]
    feed.seek(start)
    assert drawn(feed, 4) == batches
