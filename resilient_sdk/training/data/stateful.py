"""Loaders that keep their own place: torchdata's StatefulDataLoader and what has the same two methods."""

import base64
import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.data.feed import EndOfData, Feed, Share, decode, encode, length_of
from resilient_sdk.training.data.order import Cursor, begin_epoch
from resilient_sdk.training.data.workers import init_for, stop
from resilient_sdk.training.rng import derive_seed, isolated_rng

_KIND = "stateful"


class StatefulFeed(Feed):
    """Goes back by the loader's own state_dict and load_state_dict. The loader must be this rank's own."""

    def __init__(self, loader: Any, share: Share) -> None:
        if share.world_size > 1:
            raise ConfigError(
                f"A {type(loader).__name__} keeps the place of one rank, not of {share.world_size}",
                fix="Give a function (rank, world_size) that makes each rank's own",
            )
        self._loader, self._share = loader, share
        self._cursor = Cursor()
        self._iterator: Iterator[Any] | None = None
        self._begun = False
        self._ended = False
        self._known: bytes | None = None  # the loader's state at the cursor, once somebody asked for it
        self.length = length_of(loader, share)
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = init_for(loader)
        self.guarantee = (
            f"As exact as {type(loader).__name__}'s own state_dict: the order comes back; random numbers are "
            "seeded for each micro-batch without workers, and not replayed inside workers."
        )

    def position(self) -> bytes:
        at = self._cursor
        return encode(
            _KIND,
            seed=self._share.seed,
            at=at.at,
            epoch=at.epoch,
            offset=at.offset,
            ended=self._ended,
            state=base64.b64encode(b"" if self._ended else self._state()).decode(),
        )

    def seek(self, position: bytes) -> None:
        place = decode(position, _KIND, seed=self._share.seed)
        self.close()
        self._cursor = Cursor(place["at"], place["epoch"], place["offset"])
        self._known, self._ended = base64.b64decode(place["state"]) or None, place["ended"]

    def draw(self) -> Any:
        if self._ended:
            raise EndOfData
        try:
            batch = self._next()
        except EndOfData:
            self._ended = True
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        self._known = None
        return batch

    def close(self) -> None:
        if self._iterator is not None:
            stop(self._iterator)
        self._iterator = None

    def _state(self) -> bytes:
        if self._known is None:
            self._running(self._cursor.epoch)
            self._known = pickle.dumps(self._loader.state_dict())
        return self._known

    def _next(self) -> Any:
        at = self._cursor
        item = self._advance(at)
        if item is _END:
            if at.offset == 0:
                raise ConfigError(f"The loader gave no micro-batch in epoch {at.epoch}", fix="Give more data")
            if at.epoch + 1 == self._share.epochs:
                raise EndOfData
            at = Cursor(at.at, at.epoch + 1, 0)
            self._iterator = self._iterate(at.epoch)
            item = self._advance(at)
            if item is _END:
                raise ConfigError(f"The loader gave no micro-batch in epoch {at.epoch}", fix="Give more data")
        self._cursor = Cursor(at.at + 1, at.epoch, at.offset + 1)
        return item

    def _advance(self, at: Cursor) -> Any:
        iterator = self._running(at.epoch)
        with isolated_rng(derive_seed(self._share.seed, "item", at.epoch, at.offset)):
            return next(iterator, _END)

    def _running(self, epoch: int) -> Iterator[Any]:
        if self._iterator is None:
            if self._known is not None:
                # Our own bytes, from the run's own store, which also holds the code that this process runs.
                self._loader.load_state_dict(pickle.loads(self._known))  # noqa: S301
            elif self._begun:
                raise ConfigError("The loader's place is lost after an error", fix="Seek to a position first")
            self._iterator = self._iterate(epoch)
        return self._iterator

    def _iterate(self, epoch: int) -> Iterator[Any]:
        self._begun = True
        seed = derive_seed(self._share.seed, "epoch", epoch)
        with isolated_rng(seed):
            begin_epoch(self._loader, epoch, seed)
            return iter(self._loader)


_END = object()
