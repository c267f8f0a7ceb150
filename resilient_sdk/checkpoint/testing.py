"""Doubles for tests: a rank's state without a model."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from resilient_sdk.checkpoint.layout import Bytes, State


class ArraySource:
    """A numpy array as a `Source`."""

    def __init__(self, name: str, array: npt.NDArray[np.uint8]) -> None:
        self.name = name
        self.array = array
        self.nbytes = array.nbytes

    def copy_into(self, target: Bytes, offset: int) -> None:
        target[:] = self.array[offset : offset + len(target)]


def random_sources(seed: int, sizes: Mapping[str, int]) -> list[ArraySource]:
    """Returns arrays of these lengths in bytes; the same seed gives the same bytes."""
    numbers = np.random.default_rng(seed)
    return [ArraySource(name, numbers.integers(0, 256, nbytes, np.uint8)) for name, nbytes in sizes.items()]


def is_state(state: State, sources: list[ArraySource], scalars: bytes) -> bool:
    """Whether `state` is, byte for byte, what the sources hold."""
    same_names = list(state.arrays) == [source.name for source in sources]
    same_bytes = all(np.array_equal(state.arrays[source.name], source.array) for source in sources)
    return same_names and same_bytes and state.scalars == scalars
