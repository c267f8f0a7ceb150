"""A rank's whole state between two steps: gathered for a snapshot, and loaded again.

Arrays: the engine's tensors (`engine/…`) and those in what the user registered (`user/NAME/…`). Scalars: the
rest, pickled. It is unpickled only from this run's own memory or under the run's signature.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from resilient_sdk.checkpoint.layout import Source, State
from resilient_sdk.errors import ConfigError
from resilient_sdk.training import engine as engines
from resilient_sdk.training.data import Feed
from resilient_sdk.training.rng import capture_rng, restore_rng


class Stateful(Protocol):
    """What a user may register: torch's own convention."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TensorSource:
    """A tensor's bytes, wherever it lives: copied at capture, never before."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        # A view wherever the tensor is contiguous: a copy here would double the cost of each step.
        self._bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.nbytes = self._bytes.numel()

    def copy_into(self, target: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> None:
        torch.from_numpy(target).copy_(self._bytes[offset : offset + target.size])


@dataclass(frozen=True, slots=True)
class _Moved:
    """Stands in a user's state_dict for a tensor that travels as an array."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


@dataclass(slots=True)
class RankState:
    """The parts of which a rank's state is made. The parts live on; their contents change with each step.

    `open` makes the feed of a rank: a standby learns its rank only when it is promoted.
    """

    open: Callable[[int], Feed]
    feed: Feed | None = None
    registered: dict[str, Stateful] = field(default_factory=dict)

    def register(self, name: str, part: Stateful) -> None:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"{name!r} cannot be registered: {type(part).__name__} has no state_dict/load_state_dict",
                fix="Give it both methods, as torch's own objects have.",
            )
        if name in self.registered:
            raise ConfigError(f"{name!r} is registered already", fix="Choose another name.")
        self.registered[name] = part

    def draw(self) -> Any:
        """The next micro-batch of this rank."""
        assert self.feed is not None
        return self.feed.draw()

    def own(self, rank: int) -> None:
        """Opens the rank's data, once."""
        if self.feed is None:
            self.feed = self.open(rank)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()

    def gather(self, engine: Any, step: int) -> tuple[list[Source], bytes]:
        """Sources that alias live tensors, to be copied before the next step, and the pickled rest."""
        assert self.feed is not None
        held = engines.state_of(engine)
        arrays = {f"engine/{name}": tensor for name, tensor in held.tensors.items()}
        user = {
            name: _take_out(part.state_dict(), f"user/{name}", arrays)
            for name, part in self.registered.items()
        }
        scalars = pickle.dumps(
            {
                "step": step,
                "engine": held.scalars,
                "user": user,
                "feed": self.feed.position(),
                "rng": capture_rng(),
            }
        )
        return [TensorSource(name, tensor) for name, tensor in arrays.items()], scalars

    def load(self, engine: Any, state: State) -> None:
        """Every part as it was. Collective: all ranks call it together. `state` is verified already."""
        assert self.feed is not None
        scalars = pickle.loads(state.scalars)  # noqa: S301  # this run's own, see the module's docstring
        missing = set(scalars["user"]) ^ set(self.registered)
        if missing:
            raise ConfigError(
                f"what is registered differs from what was saved: {', '.join(sorted(missing))}",
                fix="Register the same names in every run of the script, before job.steps().",
            )
        prefix = "engine/"
        tensors = {
            name[len(prefix) :]: array for name, array in state.arrays.items() if name.startswith(prefix)
        }
        engines.load_state(engine, tensors, scalars["engine"])
        for name, part in self.registered.items():
            part.load_state_dict(_put_back(scalars["user"][name], state.arrays))
        self.feed.seek(scalars["feed"])
        # Last: nothing after it may draw from a generator.
        restore_rng(scalars["rng"])


def _take_out(tree: Any, path: str, arrays: dict[str, torch.Tensor]) -> Any:
    """The tree with every tensor moved to `arrays`: pickling a large one would copy it twice a step."""
    if isinstance(tree, torch.Tensor):
        arrays[path] = tree
        return _Moved(path, tree.dtype, tuple(tree.shape), str(tree.device))
    if isinstance(tree, dict):
        return {key: _take_out(value, f"{path}/{key}", arrays) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_take_out(value, f"{path}/{place}", arrays) for place, value in enumerate(tree))
    return tree


def _put_back(tree: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(tree, _Moved):
        # A copy: the array is a view of a snapshot that later steps overwrite.
        raw = torch.from_numpy(arrays[tree.name].copy())
        return raw.view(tree.dtype).reshape(tree.shape).to(tree.device)
    if isinstance(tree, dict):
        return {key: _put_back(value, arrays) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_put_back(value, arrays) for value in tree)
    return tree
