"""In which order the samples come: a pure function of the seed and the epoch."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.rng import derive_seed, isolated_rng

_KEPT_EPOCHS = 2  # a batch may cross two epochs; a survivor that goes back a step must not permute again


class Order(ABC):
    """The units of each epoch: indices of samples, or lists of them that form a batch."""

    count: int | None
    """Units in every epoch; None if epochs differ."""

    def about(self) -> int | None:
        """Returns what is known of the units in an epoch."""
        return self.count

    @abstractmethod
    def size(self, epoch: int) -> int:
        """Returns the number of units in that epoch."""

    @abstractmethod
    def pick(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Returns units `start` to `stop - 1` of that epoch, fewer at its end."""


class InSequence(Order):
    """0, 1, 2 … in every epoch."""

    def __init__(self, count: int) -> None:
        self.count: int = count

    def size(self, epoch: int) -> int:  # noqa: ARG002
        return self.count

    def pick(self, epoch: int, start: int, stop: int) -> list[int]:  # noqa: ARG002
        return list(range(start, min(stop, self.count)))


class Shuffled(Order):
    """A permutation that depends on (seed, epoch) only. Holds 8 bytes a sample for each of two epochs."""

    def __init__(self, count: int, seed: int) -> None:
        self.count: int = count
        self._seed = seed
        self._kept: dict[int, NDArray[np.int64]] = {}

    def size(self, epoch: int) -> int:  # noqa: ARG002
        return self.count

    def pick(self, epoch: int, start: int, stop: int) -> list[int]:
        if epoch not in self._kept:
            own = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            _keep(self._kept, epoch, torch.randperm(self.count, generator=own).numpy())
        picked: list[int] = self._kept[epoch][start:stop].tolist()
        return picked


class OfSampler(Order):
    """The user's own sampler (or batch sampler), listed once per epoch under a seed of (seed, epoch)."""

    count = None

    def __init__(self, sampler: Collection[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._kept: dict[int, list[Any]] = {}

    def about(self) -> int | None:
        return len(self._sampler)

    def size(self, epoch: int) -> int:
        return len(self._units(epoch))

    def pick(self, epoch: int, start: int, stop: int) -> list[Any]:
        return self._units(epoch)[start:stop]

    def _units(self, epoch: int) -> list[Any]:
        if epoch not in self._kept:
            units = self._listed(epoch)
            if not self._kept and units != self._listed(epoch):
                raise ConfigError(
                    f"The sampler {type(self._sampler).__name__} gives another order each time it is asked",
                    fix="Draw its random numbers from torch's global generator, or give it a set_epoch",
                )
            _keep(self._kept, epoch, units)
        return self._kept[epoch]

    def _listed(self, epoch: int) -> list[Any]:
        seed = derive_seed(self._seed, "order", epoch)
        with isolated_rng(seed):
            begin_epoch(self._sampler, epoch, seed)
            return [unit if isinstance(unit, int) else _plain(unit) for unit in self._sampler]


@dataclass(frozen=True)
class Cursor:
    """A place in the endless stream of epochs: `at` units from its start, `offset` of them in `epoch`."""

    at: int = 0
    epoch: int = 0
    offset: int = 0


class Stream:
    """Epoch after epoch without a seam: a batch may hold the end of one and the start of the next."""

    def __init__(self, order: Order, epochs: int | None) -> None:
        self.order = order
        self._epochs = epochs

    def take(self, cursor: Cursor, count: int) -> tuple[list[Any], Cursor] | None:
        """Returns the next `count` units and the place after them, or None if fewer are left."""
        units: list[Any] = []
        epoch, offset = cursor.epoch, cursor.offset
        while len(units) < count:
            if epoch == self._epochs:
                return None
            size = self.order.size(epoch)
            if size == 0:
                raise ConfigError(
                    f"The sampler gave nothing in epoch {epoch}",
                    fix="Give a sampler that can be iterated again",
                )
            part = self.order.pick(epoch, offset, offset + count - len(units))
            units += part
            offset += len(part)
            if offset >= size:
                epoch, offset = epoch + 1, 0
        return units, Cursor(cursor.at + count, epoch, offset)


def begin_epoch(source: object, epoch: int, seed: int) -> None:
    """Tells a sampler or an iterable which epoch comes: calls its `set_epoch`, seeds its own generator.

    Looks into a BatchSampler and a DataLoader. A torch.Generator that just runs on would give a
    promoted standby another order than the rank it replaces.
    """
    inner = source.dataset if isinstance(source, DataLoader) else None
    for part in (source, getattr(source, "sampler", None), inner):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        own = getattr(part, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)


def _keep(kept: dict[int, Any], epoch: int, units: Any) -> None:
    while len(kept) >= _KEPT_EPOCHS:
        del kept[max(kept, key=lambda known: abs(known - epoch))]
    kept[epoch] = units


def _plain(unit: Any) -> Any:
    # Samplers yield tensors and arrays, too; those cannot be compared as values.
    return unit.tolist() if isinstance(unit, (torch.Tensor, np.ndarray, np.generic)) else unit
