"""Plain iterables: every rank reads all of the sequence and keeps its own micro-batches."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data.feed import EndOfData, Feed, Share, decode, encode, length_of
from resilient_sdk.training.data.order import Cursor, begin_epoch
from resilient_sdk.training.data.workers import stop
from resilient_sdk.training.rng import derive_seed, isolated_rng

_AGAIN = "iterable"
_ONCE = "iterator"
_KEPT_POSITIONS = 2  # a survivor may be one committed step ahead of the place it must go back to


class IterableFeed(Feed):
    """Serves something that can be iterated again, from wherever it is told to, by skipping.

    Epochs follow each other without a seam. The last micro-batches of the run that are not enough
    for every rank are not served: at most world size - 1.
    """

    def __init__(self, source: Iterable[Any], share: Share) -> None:
        self._source, self._share = source, share
        self._cursor = Cursor()  # of the next draw
        self._reached = Cursor()  # of the iterator, never behind when it runs
        self._iterator: Iterator[Any] = _NOTHING
        self._ended = False
        self.length = length_of(source, share)
        self.guarantee = (
            "Micro-batches come in the iterable's own order, each to one rank, exactly once if iterating "
            "again gives the same; global CPU generators are seeded for each one; going back iterates the "
            f"epoch anew and skips, at the cost of producing what is skipped{_striped(share)}."
        )

    def position(self) -> bytes:
        at = self._cursor
        return encode(_AGAIN, seed=self._share.seed, at=at.at, epoch=at.epoch, offset=at.offset)

    def seek(self, position: bytes) -> None:
        place = decode(position, _AGAIN, seed=self._share.seed)
        self._cursor = Cursor(place["at"], place["epoch"], place["offset"])
        self._ended = False

    def draw(self) -> Any:
        if self._ended:
            raise EndOfData
        try:
            self._align()
            mine = [self._next() for _ in range(self._share.world_size)][self._share.rank]
        except EndOfData:
            self._ended = True
            self.close()
            raise
        except BaseException:
            self.close()  # an iterator that raised is over: the next draw iterates anew, to the same place
            raise
        self._cursor = self._reached
        return mine

    def close(self) -> None:
        stop(self._iterator)
        self._iterator = _NOTHING

    def _align(self) -> None:
        """Brings the iterator to the place of the next draw."""
        wanted, reached = self._cursor, self._reached
        if self._iterator is _NOTHING or reached.at > wanted.at or reached.epoch != wanted.epoch:
            self._begin(Cursor(wanted.at - wanted.offset, wanted.epoch, 0))
        while self._reached.at < wanted.at:
            if self._advance() is _END:
                raise ConfigError(
                    f"Iterating again ended at micro-batch {self._reached.offset} of {wanted.offset} drawn",
                    fix="Give an iterable that yields the same every time",
                )

    def _begin(self, place: Cursor) -> None:
        self.close()
        seed = derive_seed(self._share.seed, "epoch", place.epoch)
        with isolated_rng(seed):
            begin_epoch(self._source, place.epoch, seed)
            self._iterator = iter(self._source)
        self._reached = place

    def _next(self) -> Any:
        while (item := self._advance()) is _END:
            at = self._reached
            if at.offset == 0:
                raise ConfigError(
                    f"The iterable gave no micro-batch in epoch {at.epoch}",
                    fix="Give one that can be iterated again, or a function (rank, world_size)",
                )
            if at.epoch + 1 == self._share.epochs:
                raise EndOfData
            self._begin(Cursor(at.at, at.epoch + 1, 0))
        return item

    def _advance(self) -> Any:
        at = self._reached
        with isolated_rng(derive_seed(self._share.seed, "item", at.epoch, at.offset)):
            item = next(self._iterator, _END)
        if item is not _END:
            self._reached = Cursor(at.at + 1, at.epoch, at.offset + 1)
        return item


class IteratorFeed(Feed):
    """Serves what can be read once only, and keeps what was drawn since the last two positions taken.

    Holds a copy of each micro-batch kept: training may change the one it was given. Take a position
    at every optimizer step, or what is kept grows without end.
    """

    def __init__(self, source: Iterator[Any], share: Share) -> None:
        self._source, self._share = source, share
        self._at = self._reached = 0  # micro-batches of all ranks
        self._positions: deque[int] = deque([0], maxlen=_KEPT_POSITIONS)
        self._kept: deque[tuple[int, Any]] = deque()
        self._failed: Exception | None = None
        self.guarantee = (
            "Micro-batches come in the iterator's own order, each to one rank, exactly once; it can be read "
            "once only, so going back is possible to the last two positions taken, and a standby that takes "
            f"over produces all earlier ones again in its own process{_striped(share)}."
        )
        if share.epochs is not None and share.epochs > 1:
            raise ConfigError(f"An iterator can be read once, not in {share.epochs} epochs", fix=_MAKE_AGAIN)

    def position(self) -> bytes:
        self._remember(self._at)
        return encode(_ONCE, seed=self._share.seed, at=self._at)

    def seek(self, position: bytes) -> None:
        at = decode(position, _ONCE, seed=self._share.seed)["at"]
        oldest = min(self._positions)
        if at < oldest:
            raise ConfigError(
                f"Micro-batch {at} is gone: an iterator is read once, and what is kept starts at {oldest}",
                fix=_MAKE_AGAIN,
            )
        self._at = at
        earlier = [taken for taken in self._positions if taken < at]
        self._positions = deque([*earlier, at], maxlen=_KEPT_POSITIONS)
        self._forget()

    def draw(self) -> Any:
        while self._at > self._reached:
            self._produce(keep=False)
        if self._at < self._reached:
            batch = copy.deepcopy(next(batch for at, batch in self._kept if at == self._at))
        else:
            batch = self._produce(keep=True)
        self._at += self._share.world_size
        return batch

    def close(self) -> None:
        """Nothing to stop: the iterator is the user's."""

    def _produce(self, *, keep: bool) -> Any:
        if self._failed is not None:
            raise self._failed  # a generator that raised looks like one that ended: that would be a lie
        with isolated_rng(derive_seed(self._share.seed, "item", 0, self._reached)):
            try:
                batch = [next(self._source) for _ in range(self._share.world_size)][self._share.rank]
                if keep:
                    self._kept.append((self._reached, _pristine(batch)))
            except StopIteration:
                self._end()
            except Exception as error:
                self._failed = error
                raise
        self._reached += self._share.world_size
        return batch

    def _end(self) -> NoReturn:
        if self._reached == 0:
            raise ConfigError(
                "The iterator gave no micro-batch: it is empty, or was read before", fix=_MAKE_AGAIN
            )
        raise EndOfData

    def _remember(self, at: int) -> None:
        if at not in self._positions:
            self._positions.append(at)
            self._forget()

    def _forget(self) -> None:
        while self._kept and self._kept[0][0] < min(self._positions):
            self._kept.popleft()


_END = object()
_NOTHING: Iterator[Any] = iter(())
_MAKE_AGAIN = "Give a function (rank, world_size) that makes it, or an iterable that can be iterated again"


def _striped(share: Share) -> str:
    return f"; each rank reads all {share.world_size} ranks' micro-batches" if share.world_size > 1 else ""


def _pristine(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise ConfigError(
            "A micro-batch of the iterator cannot be copied to be served again", fix=_MAKE_AGAIN
        ) from error
