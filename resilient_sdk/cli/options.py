"""Values as torchrun and people write them."""

import os
import re

from resilient_sdk.errors import ConfigError
from resilient_sdk.runtime.devices import gpu_count

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size(text: str) -> int:
    """Bytes: 8G is 8 GiB, as for every shell tool.

    Raises:
        ConfigError: not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size", fix="Write bytes, or a number with K, M, G or T, as 8G.")
    return int(float(match[1]) * 1024 ** _UNITS[match[2].lower()])


def processes(text: str) -> int:
    """A number of ranks: a number, `cpu`, `gpu`, or `auto` (gpu where there is one, else cpu).

    Raises:
        ConfigError: none of these, or `gpu` on a machine without one.
    """
    if text in ("cpu", "gpu", "auto"):
        gpus = gpu_count() if text != "cpu" else 0
        if gpus or text != "gpu":
            return gpus or os.cpu_count() or 1
        raise ConfigError("nproc = gpu, and there is no GPU here", fix="Give a number, or cpu.")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"nproc = {text!r}", fix="Give a number, cpu, gpu or auto.") from None


def require_one_node(nnodes: str) -> None:
    """torchrun's --nnodes, where only one value is possible so far.

    Raises:
        ConfigError: more than one.
    """
    if nnodes not in ("1", "1:1"):
        raise ConfigError(f"nnodes = {nnodes}: a run lives on one machine so far", fix="Leave --nnodes out.")
