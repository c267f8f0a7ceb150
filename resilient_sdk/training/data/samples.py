"""Samples whose randomness belongs to their place in the order, not to the process that draws them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Subset

from resilient_sdk.training.rng import derive_seed, seed_cpu


class Key(NamedTuple):
    """One micro-batch to fetch: sample i of it is seeded by (seed, first + i)."""

    seed: int
    first: int
    indices: list[Any]


class Drawn(NamedTuple):
    """The samples of one micro-batch, on their way to the collate function."""

    key: Key
    samples: list[Any]


class SeededSamples(Dataset[Drawn]):
    """The user's map-style dataset, seeded before each sample.

    A dataset with a `__getitems__` of its own is seeded once for each micro-batch. The caller (a
    DataLoader worker, or a feed that isolates its generators) owns the generators that are seeded.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._at_once = _fetches_at_once(inner)

    def __getitem__(self, key: Key) -> Drawn:
        if self._at_once:
            seed_cpu(derive_seed(key.seed, "samples", key.first))
            return Drawn(key, self.inner.__getitems__(key.indices))
        samples = []
        for place, index in enumerate(key.indices, start=key.first):
            seed_cpu(derive_seed(key.seed, "sample", place))
            samples.append(self.inner[index])
        return Drawn(key, samples)


class SeededCollate:
    """The user's collate function, seeded by the micro-batch's place: masking collators draw numbers, too."""

    def __init__(self, collate: Callable[[Any], Any], *, single: bool) -> None:
        self._collate = collate
        self._single = single

    def __call__(self, drawn: Any) -> Any:
        seed_cpu(derive_seed(drawn.key.seed, "collate", drawn.key.first))
        return self._collate(drawn.samples[0] if self._single else drawn.samples)


def _fetches_at_once(dataset: Any) -> bool:
    # A Subset has __getitems__ whatever it holds; only what it holds tells whether samples come one by one.
    if type(dataset) is Subset:
        return _fetches_at_once(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
