"""One pass of the user's loop: one micro-batch, and what happens when it does not come to its end."""

from collections.abc import Callable
from types import TracebackType
from typing import Any


class Step:
    """What `job.steps()` yields. `with step as batch:` runs the body; a fault inside is undone.

    Attributes:
        index: optimizer steps finished before this one, from 0.
        micro: the micro-batch within the step, 0 … accumulation steps - 1.
        committed: after the block, whether it counted. False after a fault: the batch is served again.
    """

    def __init__(
        self, index: int, micro: int, batch: Any, leave: Callable[["Step", BaseException | None], bool]
    ) -> None:
        self.index = index
        self.micro = micro
        self.committed = False
        self.entered = False
        self.metrics: dict[str, float] = {}
        self._batch = batch
        self._leave = leave

    def report(self, **metrics: Any) -> None:
        """Numbers of this step (floats or one-element tensors) for the panel, the journal and the metrics."""
        self.metrics.update({name: _number(value) for name, value in metrics.items()})

    def __enter__(self) -> Any:
        self.entered = True
        batch, self._batch = self._batch, None
        return batch

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool:
        leave, self._leave = self._leave, _left_before
        return leave(self, problem)


def _number(value: Any) -> float:
    # torch warns of a number that leaves its graph, and a loss is one.
    return float(value.detach() if hasattr(value, "detach") else value)


def _left_before(_step: Step, _problem: BaseException | None) -> bool:
    raise RuntimeError("a step can be entered once; take the next one from job.steps()")
