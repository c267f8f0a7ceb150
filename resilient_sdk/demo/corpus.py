"""Text to train on without a download: the language reference that ships with CPython."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset


def text() -> bytes:
    """Returns all documentation topics in the order of their names: the same bytes for one Python."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class ByteText(Dataset[torch.Tensor]):
    """Windows of `context` + 1 bytes that do not overlap; what does not fill the last one is left out.

    An item is a LongTensor of shape (context + 1,), values 0 … 255: inputs and, one further, targets.
    Raises ValueError if the text does not fill one window.
    """

    def __init__(self, context: int, data: bytes | None = None) -> None:
        self._window = context + 1
        everything = torch.frombuffer(bytearray(text() if data is None else data), dtype=torch.uint8)
        if context < 1 or len(everything) < self._window:
            raise ValueError(f"{len(everything)} bytes do not fill one window of {self._window}")
        self._bytes = everything[: len(everything) // self._window * self._window].view(-1, self._window)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._bytes[index].long()
