"""Data that can be read once only, loaders that keep their own place, and what is refused."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data import EndOfData, Feed, open_feed
from resilient_sdk.training.rng import capture_rng, restore_rng, seed_everything


def opened(loader: Any, *, rank: int = 0, world: int = 1, batch: int = 2, epochs: int | None = None) -> Feed:
    return open_feed(loader, rank=rank, world_size=world, micro_batch_size=batch, seed=5, epochs=epochs)


def generator(count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.tensor([float(number), torch.rand(1).item()])


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def rest(feed: Feed) -> list[Any]:
    batches = []
    while True:
        try:
            batches.append(plain(feed.draw()))
        except EndOfData:
            return batches


@given(world=st.integers(1, 3), window=st.integers(1, 3), steps=st.integers(2, 6), data=st.data())
@settings(deadline=None)
def test_a_survivor_serves_its_last_two_windows_again(
    world: int, window: int, steps: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    feed = opened(generator(100), rank=rank, world=world)
    positions, batches = [], []
    for _ in range(steps):
        positions.append(feed.position())
        batches.append([plain(feed.draw()) for _ in range(window)])
    for back in data.draw(st.lists(st.sampled_from([-1, -2]), max_size=4)):
        feed.seek(positions[back])
        for expected, position in zip(batches[back:], positions[back:], strict=True):
            assert feed.position() == position
            assert [plain(feed.draw()) for _ in range(window)] == expected
    standby = opened(generator(100), rank=rank, world=world)
    standby.seek(positions[-1])
    assert [plain(standby.draw()) for _ in range(window)] == batches[-1]


def test_going_further_back_is_refused_with_the_fix_and_changes_nothing() -> None:
    feed = opened(generator(9))
    start = feed.position()
    for _ in range(2):
        feed.draw()
        feed.position()
    with pytest.raises(ConfigError, match=r"Micro-batch 0 is gone.* starts at 1\. Give a function"):
        feed.seek(start)
    assert plain(feed.draw())[0] == 2


def test_only_two_windows_are_kept() -> None:
    feed = opened(generator(50))
    for _ in range(40):
        feed.position()
        feed.draw()
    assert len(feed._kept) == 2  # type: ignore[attr-defined]


def test_a_batch_that_training_changed_is_served_as_it_was() -> None:
    feed = opened(generator(9))
    start = feed.position()
    for _ in range(2):
        first = feed.draw()
        expected = plain(first.clone())
        assert expected[0] == 0
        first.zero_()
        feed.seek(start)
        again = feed.draw()
        assert plain(again) == expected
        again.zero_()
        feed.seek(start)


def test_iterators_do_not_move_training_numbers() -> None:
    feed = opened(generator(9), world=2)
    seed_everything(1)
    before = capture_rng()
    expected = torch.rand(3).tolist()
    restore_rng(before)
    feed.draw()
    feed.draw()
    assert torch.rand(3).tolist() == expected


def test_an_iterator_ends() -> None:
    assert len(rest(opened(generator(7), world=3))) == 2
    feed = opened(iter([1, 2]))
    assert rest(feed) == [1, 2]
    assert rest(feed) == []


def test_an_iterator_read_before_is_an_error_not_an_end() -> None:
    used = generator(2)
    list(used)
    with pytest.raises(ConfigError, match=r"gave no micro-batch: it is empty, or was read before\. Give a"):
        opened(used).draw()


def test_a_generator_that_failed_is_not_one_that_ended() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("bad disk")

    feed = opened(failing())
    feed.draw()
    for _ in range(2):
        with pytest.raises(OSError, match="bad disk"):
            feed.draw()


def test_an_iterable_that_failed_once_serves_the_same_batch_next_time() -> None:
    failures = iter([False, False, True])

    class Flaky:
        def __iter__(self) -> Iterator[tuple[int, float]]:
            for number in range(4):
                if number == 2 and next(failures, False) is True:
                    raise OSError
                if number == 2:
                    next(failures, None)
                yield number, random.random()

    feed = opened(Flaky(), epochs=3)
    served: list[tuple[int, float]] = []
    while len(served) < 12:
        try:
            served.append(feed.draw())
        except OSError:
            continue
    assert [number for number, _ in served] == [0, 1, 2, 3] * 3


def test_a_dataset_that_leaks_a_stop_is_an_error_not_an_end() -> None:
    class Leaky:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        opened(Leaky()).draw()


class Numbered:
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


def stateful(workers: int, *, persistent: bool = False) -> Any:
    return StatefulDataLoader(
        Numbered(), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=persistent
    )


def plain_pairs(batch: Any, *, random_too: bool) -> Any:
    return (batch[0].tolist(), batch[1].tolist() if random_too else None)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch(workers: int, *, persistent: bool) -> None:
    exact = workers == 0
    seed_everything(1)
    feed = opened(stateful(workers, persistent=persistent))
    positions, batches = [], []
    for _ in range(17):  # two epochs of 7 and a part of the third
        positions.append(feed.position())
        batches.append(plain_pairs(feed.draw(), random_too=exact))
    feed.close()
    seed_everything(2)
    other = opened(stateful(workers, persistent=persistent))
    for start in (10, 0, 6, 7, 14):
        other.seek(positions[start])
        assert other.position() == positions[start]
        assert [plain_pairs(other.draw(), random_too=exact) for _ in range(3)] == batches[start : start + 3]
    other.close()


def test_a_stateful_loader_does_not_move_training_numbers_and_ends() -> None:
    seed_everything(1)
    before = capture_rng()
    expected = torch.rand(3).tolist()
    loader = stateful(0)
    restore_rng(before)
    feed = opened(lambda *_: loader, rank=1, world=2, epochs=2)
    start = feed.position()
    batches = [plain_pairs(feed.draw(), random_too=True) for _ in range(14)]
    assert rest(feed) == []
    assert torch.rand(3).tolist() == expected
    end = feed.position()
    feed.seek(start)
    assert [plain_pairs(feed.draw(), random_too=True) for _ in range(14)] == batches
    feed.seek(end)
    assert rest(feed) == []
    assert feed.length == 7


def test_a_stateful_loader_starts_in_the_same_order_whatever_the_process_did_before() -> None:
    first = []
    for seed in (1, 2):
        seed_everything(seed)
        first.append(plain_pairs(opened(stateful(0)).draw(), random_too=True))
    assert first[0] == first[1]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Own(Sampler[int]):
    """Random by a generator that nobody can seed: its order cannot be had again."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(10), 10))


class Ranked(Sampler[int]):
    num_replicas = 2

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Unsized(torch.utils.data.Dataset[int]):
    pass


class Nothing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 0


class Empty(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def ten(sampler: Any) -> DataLoader[int]:
    return DataLoader(range(10), sampler=sampler)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (3, "A int is nothing to draw"),
    "none": (None, "A NoneType is nothing to draw"),
    "a text": ("abc", "A str is not a sequence"),
    "a dict": ({1: 2}, "A dict is not a sequence"),
    "an empty dataset": ([], "The dataset is empty"),
    "an empty loader": (ten(SequentialSampler([])), "is empty"),
    "a dataset without a length": (Unsized(), "has no length"),
    "a small dataset": ([1], "1 samples in 1 epochs do not fill one micro-batch of 2 on each of 2 ranks"),
    "a sampler without a length": (ten(Endless()), "may never end"),
    "a rank's own sampler": (ten(Ranked()), "picks for one rank"),
    "a function of nothing": (lambda: [1], "cannot be called with"),
    "a function of a function": (lambda *_: lambda *_: [1], "another function"),
    "a function of none": (lambda *_: None, "A NoneType is nothing"),
    "a stateful loader for two": (stateful(0), "keeps the place of one rank"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_cannot_work_is_refused_in_one_line_with_a_fix(kind: str) -> None:
    loader, match = REFUSED[kind]
    with pytest.raises(ConfigError, match=match) as caught:
        opened(loader, world=2, epochs=1)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


REFUSED_AT_DRAW: dict[str, tuple[Any, str]] = {
    "another order each time": (ten(Own()), "another order each time"),
    "an empty iterable": (Empty(), "gave no micro-batch in epoch 0"),
    "an empty stateful loader": (lambda *_: StatefulDataLoader(Empty()), "gave no micro-batch in epoch 0"),
    "an empty sampler": (ten(DistributedSampler(Nothing(), num_replicas=1, rank=0)), "is empty"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED_AT_DRAW))
def test_what_turns_out_not_to_work_is_told_in_one_line_with_a_fix(kind: str) -> None:
    loader, match = REFUSED_AT_DRAW[kind]
    with pytest.raises(ConfigError, match=match) as caught:
        opened(loader).draw()
    assert caught.value.fix


def test_two_epochs_of_an_iterator_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="read once, not in 2 epochs"):
        opened(iter([1]), epochs=2)


@pytest.mark.parametrize(("rank", "world", "batch", "epochs"), [(2, 2, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_sizes_that_make_no_sense_are_refused(rank: int, world: int, batch: int, epochs: int) -> None:
    with pytest.raises(ConfigError, match="No feed of rank"):
        opened([1, 2], rank=rank, world=world, batch=batch, epochs=epochs)


def test_a_position_of_other_data_is_refused() -> None:
    here = opened([1, 2, 3]).position()
    for loader, match in (([1, 2], "length was 3 and is 2"), (generator(3), "of the kind 'stream'")):
        with pytest.raises(ConfigError, match=match):
            opened(loader).seek(here)
    with pytest.raises(ConfigError, match="not one of ours"):
        opened([1]).seek(b"\x80nonsense")
