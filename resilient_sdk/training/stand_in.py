"""The engine that the user's code holds: always the present one, whatever was built again behind it."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

OF_THE_GROUP = (
    "global_rank", "local_rank", "world_size", "dp_world_size", "train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
"""What a rehearsal's engine would answer for its group of one."""


class Host(Protocol):
    """The job, as far as its engine asks it."""

    @property
    def present(self) -> Any: ...
    @property
    def is_standby(self) -> bool: ...
    def watched(self) -> AbstractContextManager[None]: ...
    def of_the_group(self, name: str) -> Any: ...


class Engine:
    """Stands in for DeepSpeed's engine: the one inside is replaced at each recovery, this one stays.

    Every attribute and call goes to the present engine. Do not keep what you got from it (parameters, the
    optimizer, hooks) across steps: keep this object and ask it again.
    """

    def __init__(self, job: Host) -> None:
        object.__setattr__(self, "_job", job)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self._job.watched():
            return self._job.present(*arguments, **named)

    def backward(self, *arguments: Any, **named: Any) -> Any:
        with self._job.watched():
            return self._job.present.backward(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Any:
        with self._job.watched():
            return self._job.present.step(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_GROUP and self._job.is_standby:
            return self._job.of_the_group(name)
        return getattr(self._job.present, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"engine.{name} cannot be set: the engine inside is replaced at a recovery and would lose it"
        )
