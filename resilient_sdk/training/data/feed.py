"""What a job draws its micro-batches from, and how a place in it is written down."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from resilient_sdk.errors import ConfigError
from resilient_sdk.training.rng import derive_seed


class EndOfData(Exception):
    """No micro-batch is left. Not a fault: it is to `Feed.draw` what StopIteration is to `next`."""


class Feed(ABC):
    """One rank's micro-batches, in an order that can be gone back to.

    Not safe to use from two threads at a time.
    """

    guarantee: str
    """One sentence for the user: what is exactly-once and bit-exact, and what is not."""
    length: int | None = None
    """Micro-batches per rank in one epoch, rounded down but at least 1; None if not known."""

    @abstractmethod
    def position(self) -> bytes:
        """Returns where the next micro-batch will be drawn. What workers have prefetched does not count."""

    @abstractmethod
    def seek(self, position: bytes) -> None:
        """Makes `position` the place of the next draw; any number of times, forwards or back.

        Raises ConfigError if the position is not of this data, or cannot be gone back to; the feed
        stays where it is then.
        """

    @abstractmethod
    def draw(self) -> Any:
        """Returns the next micro-batch and moves on; stays in place if it raises.

        Raises EndOfData after the last micro-batch, ConfigError if the data cannot keep its promise,
        and whatever the user's own code raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops DataLoader workers and lets go of the data's iterator. May be called twice."""


@dataclass(frozen=True)
class Share:
    """Whose part of the data a feed serves, and the seed of everything random in it."""

    rank: int
    world_size: int
    seed: int
    epochs: int | None

    def alone(self) -> "Share":
        """Returns the share of a rank whose data was cut out for it: all of it, and a seed of its own."""
        return Share(0, 1, derive_seed(self.seed, "rank", self.rank), self.epochs)


def encode(kind: str, **place: int | str | bool | None) -> bytes:
    """Returns a position of a feed of that kind."""
    return json.dumps({"kind": kind, **place}, sort_keys=True).encode()


def decode(position: bytes, kind: str, **same: int | None) -> dict[str, Any]:
    """Returns the place in `position`. Raises ConfigError unless its kind and the values in `same` agree."""
    try:
        place = json.loads(position)
        found = place["kind"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "The position in the data is not one of ours", fix="Give what position() returned"
        ) from error
    if found != kind:
        raise ConfigError(
            f"The position was taken in data of the kind '{found}', and this is '{kind}'",
            fix="Give the loader that the run was started with",
        )
    for name, value in same.items():
        # Another seed or length is another order: going on would serve samples twice and others never.
        if place[name] != value:
            raise ConfigError(
                f"The data changed since the position was taken: {name} was {place[name]} and is {value}",
                fix="Give the same data and seed, or start a new run",
            )
    return dict(place)


def length_of(source: object, share: Share) -> int | None:
    """Returns the micro-batches per rank in one pass over `source`, None if it does not tell."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None  # asking would make torch warn later that its dataset was wrong
    return max(1, len(source) // share.world_size) if isinstance(source, Sized) else None
