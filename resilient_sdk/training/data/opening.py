"""From whatever the user calls a loader to a feed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data.feed import Feed, Share
from resilient_sdk.training.data.iterated import IterableFeed, IteratorFeed
from resilient_sdk.training.data.order import InSequence, OfSampler, Order, Shuffled, Stream
from resilient_sdk.training.data.stateful import StatefulFeed
from resilient_sdk.training.data.streamed import Cut, StreamFeed
from resilient_sdk.training.data.workers import init_for
from resilient_sdk.training.rng import derive_seed, isolated_rng

_ACCEPTED = (
    "Give a Dataset, DataLoader, iterable of micro-batches, or a function (rank, world_size) that makes one"
)


def open_feed(
    loader: Any, *, rank: int, world_size: int, micro_batch_size: int, seed: int, epochs: int | None
) -> Feed:
    """Opens one rank's feed of micro-batches from `loader`. Nothing is drawn and no worker started yet.

    - A torch Dataset, or anything with a length and indices (a list holds samples, not batches):
      micro-batches of `micro_batch_size`, shuffled. An IterableDataset: micro-batches of that size,
      in its own order, the incomplete last of an epoch dropped.
    - A DataLoader: its own batch size; shuffled if it shuffles; its workers and functions are kept.
      A sampler of the user's own decides the order. One that belongs to a rank (DistributedSampler)
      is not asked: ranks are taken care of here. `drop_last` means nothing, as every batch is full.
    - A torchdata StatefulDataLoader: by its own state. For more than one rank: from a function.
    - Another iterable, an iterator or a generator: yields micro-batches, the same on every rank.
    - A function (rank, world_size) that returns any of these: already that rank's own; called in
      each process that takes the rank, and again whenever an iterator it made must be gone back in.

    Datasets and DataLoaders around them become one stream of epochs: every sample once an epoch, none
    dropped or repeated, every batch full, a batch crossing two epochs where they meet. After `epochs`
    (None: no end), at most micro-batch x world size - 1 samples are not served, once a run.

    Raises ConfigError for anything else, for data that cannot fill one micro-batch on every rank, and
    for a rank's own sampler that is not made by a function.
    """
    if not 0 <= rank < world_size or micro_batch_size < 1 or (epochs is not None and epochs < 1):
        raise ConfigError(
            f"No feed of rank {rank} of {world_size}, micro-batch {micro_batch_size}, epochs {epochs}",
            fix="Sizes and epochs start at 1, ranks at 0",
        )
    share = Share(rank, world_size, seed, epochs)
    if _is_function(loader):
        return _of_function(loader, share, micro_batch_size)
    return _of_data(loader, share, micro_batch_size, own=False)


def _is_function(loader: object) -> bool:
    data = isinstance(loader, (Dataset, Iterable)) or hasattr(type(loader), "__getitem__")
    return callable(loader) and not data


def _of_function(make: Callable[[int, int], Any], share: Share, micro_batch_size: int) -> Feed:
    try:
        inspect.signature(make).bind(share.rank, share.world_size)
    except TypeError as error:
        raise ConfigError(
            f"The loader function cannot be called with (rank, world_size): {error}",
            fix="Give a function of two arguments that returns that rank's data",
        ) from error
    made = _Made(make, share)
    if isinstance(made.first, Iterator):
        return IterableFeed(made, share.alone())
    if _is_function(made.first):
        raise ConfigError("The loader function returned another function", fix=_ACCEPTED)
    return _of_data(made.first, share.alone(), micro_batch_size, own=True)


class _Made:
    """What a function made, made again whenever it is iterated again: so a generator can be gone back in."""

    def __init__(self, make: Callable[[int, int], Any], share: Share) -> None:
        self._make, self._share = make, share
        self.first = self._fresh()
        self._unused = True

    def __iter__(self) -> Iterator[Any]:
        if self._unused:
            self._unused = False
            return iter(self.first)
        return iter(self._fresh())

    def _fresh(self) -> Any:
        with isolated_rng(derive_seed(self._share.seed, "make", self._share.rank)):
            return self._make(self._share.rank, self._share.world_size)


def _of_data(loader: Any, share: Share, micro_batch_size: int, *, own: bool) -> Feed:
    if isinstance(loader, (str, bytes, Mapping, set, frozenset)):
        raise ConfigError(
            f"A {type(loader).__name__} is not a sequence of samples or micro-batches", fix=_ACCEPTED
        )
    if isinstance(loader, IterableDataset):
        loader = DataLoader(loader, batch_size=micro_batch_size, drop_last=True)
    if _is_stateful(loader):
        return StatefulFeed(loader, share)
    if isinstance(loader, DataLoader):
        return _of_loader(loader, share, own=own)
    if isinstance(loader, Iterator):
        return IteratorFeed(loader, share)
    if isinstance(loader, Dataset) or (hasattr(loader, "__len__") and hasattr(loader, "__getitem__")):
        return _of_dataset(loader, share, micro_batch_size)
    if isinstance(loader, Iterable):
        return IterableFeed(loader, share)
    raise ConfigError(f"A {type(loader).__name__} is nothing to draw micro-batches from", fix=_ACCEPTED)


def _is_stateful(loader: object) -> bool:
    return isinstance(loader, Iterable) and all(
        callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _of_dataset(dataset: Any, share: Share, micro_batch_size: int) -> Feed:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"The dataset {type(dataset).__name__} has no length",
            fix="Give it __len__, or a DataLoader with a sampler",
        )
    order = Shuffled(_filled(len(dataset)), share.seed)
    loader = DataLoader(dataset, batch_size=micro_batch_size)
    return StreamFeed(loader, Stream(order, share.epochs), Cut(micro_batch_size), share)


def _of_loader(loader: DataLoader[Any], share: Share, *, own: bool) -> Feed:
    # A subclass that iterates in its own way would be undone by a rebuild: it is an iterable like others.
    if type(loader).__iter__ is not DataLoader.__iter__:
        loader.worker_init_fn = init_for(loader)
        return IterableFeed(loader, share)
    if isinstance(loader.dataset, IterableDataset):
        return IterableFeed(_fresh_workers(loader), share)
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        order: Order = _of_sampler(batches, share, own=own)
        return StreamFeed(loader, Stream(order, share.epochs), Cut(1, batches=True), share)
    order = _of_sampler(loader.sampler if batches is None else batches.sampler, share, own=own)
    cut = Cut(1, single=True) if batches is None else Cut(batches.batch_size)
    return StreamFeed(loader, Stream(order, share.epochs), cut, share)


def _of_sampler(sampler: Any, share: Share, *, own: bool) -> Order:
    if type(sampler) is SequentialSampler:
        return InSequence(_filled(len(sampler)))
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    ):
        return Shuffled(_filled(len(sampler)), share.seed)
    if not own and isinstance(sampler, DistributedSampler) and _iterates_as(sampler, DistributedSampler):
        count = _filled(len(sampler.dataset))  # type: ignore[arg-type]
        return Shuffled(count, share.seed) if sampler.shuffle else InSequence(count)
    if not own and getattr(sampler, "num_replicas", 1) > 1:
        raise ConfigError(
            f"The sampler {type(sampler).__name__} picks for one rank, and every rank was given the same",
            fix="Give a function (rank, world_size) that makes the DataLoader",
        )
    if not hasattr(sampler, "__len__"):
        raise ConfigError(
            f"The sampler {type(sampler).__name__} has no length: it may never end",
            fix="Give it __len__, or a function (rank, world_size) that makes an iterable of micro-batches",
        )
    return OfSampler(sampler, share.seed)


def _iterates_as(sampler: object, kind: type[DistributedSampler[Any]]) -> bool:
    module = type(sampler).__module__.partition(".")[0]
    return type(sampler) is kind or module == "torchdata"  # whose own only adds a state


def _filled(count: int) -> int:
    if count == 0:
        raise ConfigError("The dataset is empty", fix="Give one with at least one sample")
    return count


def _fresh_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    # Persistent workers would carry random state from epoch to epoch: none could be entered by itself.
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=init_for(loader),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
