"""Random state as data: seed it, take it, put it back, bit for bit.

Python's, numpy's and torch's global generators are part of the training state: dropout that draws
other numbers after a recovery is another run.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from resilient_sdk.errors import ConfigError, NewerFormat

_FORMAT = 1


def derive_seed(seed: int, *names: int | str) -> int:
    """Returns a seed in [0, 2**63) that depends on `seed` and `names` only.

    The same in every process and on every machine (Python's own `hash` of a text is not). Different
    names give unrelated seeds; 1 and "1" are different names.
    """
    text = repr((int(seed), *(name if isinstance(name, str) else int(name) for name in names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_cpu(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch's CPU; CUDA's are left alone."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy, torch's CPU and all CUDA devices; CUDA that has not started seeds when it does."""
    seed_cpu(seed)
    torch.manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)


def capture_rng() -> dict[str, Any]:
    """Returns the state of all global generators: about 10 kB and 16 bytes a CUDA device, picklable.

    The state shares no memory with the generators. CUDA's part is None while CUDA has not started
    in this process: asking would start it.
    """
    return {
        "format": _FORMAT,
        "python": _capture_python(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": _capture_cuda(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what `capture_rng` took, here or in another process.

    The state of the device that was current then goes to the device that is current now: a standby
    may own another device than the rank it replaces.

    Raises NewerFormat for the state of a later version, and ConfigError for a state with CUDA where
    there is none; nothing is changed then.
    """
    if state["format"] > _FORMAT:
        raise NewerFormat(
            "The random state was written by a newer version",
            fix="Update resilient-sdk",
            found=state["format"],
            known=_FORMAT,
        )
    if state["cuda"] is not None and not torch.cuda.is_available():
        raise ConfigError(
            "The random state holds CUDA's, and this process has no CUDA", fix="Resume on a GPU"
        )
    _restore_python(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None:
        _restore_cuda(state["cuda"])


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Runs a block on CPU generators of its own, seeded if `seed` is given; the process's come back after it.

    Without this, a dataset's augmentation would move training's dropout. CUDA's generators are not isolated.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        if seed is not None:
            seed_cpu(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def _capture_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32).tobytes(), "gauss": gauss}


def _restore_python(state: dict[str, Any]) -> None:
    words = np.frombuffer(state["words"], dtype=np.uint32).tolist()
    random.setstate((state["version"], tuple(words), state["gauss"]))


def _capture_cuda() -> dict[str, Any] | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    states = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return {"current": torch.cuda.current_device(), "devices": states}


def _restore_cuda(state: dict[str, Any]) -> None:
    devices: list[bytes] = state["devices"]
    for index, device in enumerate(devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(device), index)
    torch.cuda.set_rng_state(_tensor(devices[state["current"]]), torch.cuda.current_device())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
