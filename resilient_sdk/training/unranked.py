"""A worker without a rank: whoever asks for its number gets none, rather than a wrong one.

A standby rehearses as rank 0 of a group of one. That is DeepSpeed's to know and not the user's: what the user's
code derives from it before its first step would be kept when the standby is promoted.
"""

import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

NO_RANK = "a standby has none"
"""What RANK and LOCAL_RANK are in a standby's environment: int() of it fails, where a missing one reads as 0."""
_OURS = ("torch", "deepspeed", "resilient_sdk")


class NeedsRank(BaseException):
    """A standby's code asked for its rank. Unwinds it: it will run again, from the top, when it has one.

    Not an Exception, so that the user's code does not catch it. The message says what was asked.
    """


def hide_rank(world_size: int) -> None:
    """From now on the environment tells the job's size and no rank."""
    environment = os.environ  # noqa: TID251 (read by whoever does not ask the job)
    environment.update(RANK=NO_RANK, LOCAL_RANK=NO_RANK, WORLD_SIZE=str(world_size))
    environment["LOCAL_WORLD_SIZE"] = str(world_size)


def hide_group_rank() -> None:
    """The same in a rehearsal's step, where DeepSpeed asks for the device: that number is told, and is right."""
    os.environ["RANK"] = NO_RANK  # noqa: TID251


class Guard:
    """`get_rank` and `get_world_size` of some modules, as the user's code is to see them without a rank."""

    def __init__(self, modules: Iterable[Any], world_size: int) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._active = True
        for module in modules:
            for name in ("get_rank", "get_local_rank", "get_node_local_rank", "get_world_size"):
                if hasattr(module, name):
                    original = getattr(module, name)
                    self._replaced.append((module, name, original))
                    setattr(module, name, self._guarded(f"{module.__name__}.{name}", original, world_size))

    def end(self) -> None:
        """The worker has a rank: everything as it was, also for who kept what it had imported."""
        self._active = False
        while self._replaced:
            module, name, original = self._replaced.pop()
            setattr(module, name, original)

    def _guarded(self, name: str, original: Callable[..., Any], world_size: int) -> Callable[..., Any]:
        def ask(*arguments: Any, **named: Any) -> Any:
            if self._active and not _is_ours(sys._getframe(1)):
                if name.endswith("world_size"):
                    return world_size
                raise NeedsRank(f"{name}() was asked")
            return original(*arguments, **named)

        return ask


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS
