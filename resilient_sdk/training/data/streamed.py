"""Map-style data: a dataset, or a DataLoader around one, in an order that can be entered anywhere."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data.feed import EndOfData, Feed, Share, decode, encode
from resilient_sdk.training.data.order import Cursor, Stream
from resilient_sdk.training.data.samples import Key, SeededCollate, SeededSamples
from resilient_sdk.training.data.workers import init_for, stop
from resilient_sdk.training.rng import derive_seed, isolated_rng

_KIND = "stream"


class Cut(NamedTuple):
    """How the stream is cut: `each` units to a rank in turn. With `batches`, a unit is a batch of samples."""

    each: int
    batches: bool = False
    single: bool = False


class StreamFeed(Feed):
    """Serves the stream of epochs from wherever it is told to, through a DataLoader rebuilt from the user's.

    With `epochs`, the last samples that do not fill a micro-batch on every rank are not served: at
    most micro-batch x world size - 1 of the whole run.
    """

    def __init__(self, loader: DataLoader[Any], stream: Stream, cut: Cut, share: Share) -> None:
        self._stream, self.cut, self._share = stream, cut, share
        self._group = cut.each * share.world_size
        self._cursor = Cursor()
        self._ahead: deque[Cursor] = deque()
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()  # of worker seeds: the global one belongs to training
        self._loader = _rebuilt(loader, self, self._generator)
        count = stream.order.count
        about = stream.order.about()
        self.length = None if about is None else max(1, about // self._group)
        self.guarantee = _guarantee(cut)
        if count is not None and share.epochs is not None and count * share.epochs < self._group:
            raise ConfigError(
                f"{count} samples in {share.epochs} epochs do not fill one micro-batch of {cut.each} "
                f"on each of {share.world_size} ranks",
                fix="Give more data or epochs, or a smaller micro-batch",
            )

    def position(self) -> bytes:
        at = self._cursor
        return encode(
            _KIND,
            seed=self._share.seed,
            length=self._stream.order.count,
            at=at.at,
            epoch=at.epoch,
            offset=at.offset,
        )

    def seek(self, position: bytes) -> None:
        place = decode(position, _KIND, seed=self._share.seed, length=self._stream.order.count)
        cursor = Cursor(place["at"], place["epoch"], place["offset"])
        if cursor != self._cursor:
            self._cursor = cursor
            self._iterator = None  # the workers stay; the next iter() throws away what they prefetched

    def draw(self) -> Any:
        with isolated_rng():
            try:
                batch = next(self._running())
            except StopIteration as stopped:
                self.close()
                self._check_end(stopped)
                raise EndOfData from None
            except BaseException:
                self.close()  # the next draw asks again for the same micro-batch, of new workers
                raise
        self._cursor = self._ahead.popleft()
        return batch

    def close(self) -> None:
        if self._loader._iterator is not None:
            stop(self._loader._iterator)
        self._iterator = None
        self._loader._iterator = None  # or the next iter() would ask workers that are no more

    def keys(self) -> Iterator[Key]:
        """Yields what to fetch from the present place on. A DataLoader runs ahead of what is handed out."""
        cursor, first = self._cursor, self._share.rank * self.cut.each
        while (taken := self._stream.take(cursor, self._group)) is not None:
            units, after = taken
            self._ahead.append(after)
            yield self._key(cursor.at + first, units[first : first + self.cut.each])
            cursor = after

    def _key(self, place: int, units: list[Any]) -> Key:
        if self.cut.batches:
            return Key(derive_seed(self._share.seed, "batch", place), 0, list(units[0]))
        return Key(self._share.seed, place, units)

    def _running(self) -> Iterator[Any]:
        if self._iterator is None:
            self._ahead.clear()
            self._generator.manual_seed(derive_seed(self._share.seed, "workers"))
            self._iterator = iter(self._loader)
        return self._iterator

    def _check_end(self, stopped: StopIteration) -> None:
        # A dataset that leaks a StopIteration would else end the run early and in silence.
        if self._stream.take(self._cursor, self._group) is not None:
            raise RuntimeError(
                "The dataset raised StopIteration for a sample that its length promises"
            ) from stopped


class _Keys:
    """The DataLoader's sampler: starts anew, at the feed's place, whenever it is iterated."""

    def __init__(self, feed: StreamFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Key]:
        return self._feed.keys()


def _rebuilt(loader: DataLoader[Any], feed: StreamFeed, generator: torch.Generator) -> DataLoader[Any]:
    return DataLoader(
        SeededSamples(loader.dataset),
        batch_size=None,
        sampler=_Keys(feed),
        num_workers=loader.num_workers,
        collate_fn=SeededCollate(loader.collate_fn, single=feed.cut.single),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=init_for(loader),
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.num_workers > 0,
    )


def _guarantee(cut: Cut) -> str:
    what = "batch of the batch sampler" if cut.batches else "sample"
    return (
        f"Every {what} is served exactly once an epoch, in an order fixed by the seed, the same bits after "
        "any fault; random numbers from Python's, numpy's and torch's global CPU generators included, "
        "those from CUDA or from generators that the dataset keeps itself not."
    )
