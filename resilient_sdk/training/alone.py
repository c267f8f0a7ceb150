"""The seat of a script that was started with plain `python`: one rank, no coordinator, nobody to take over."""

from typing import Any

from resilient_sdk.training import engine as engines
from resilient_sdk.training.engine import EngineSpec
from resilient_sdk.training.group import Group, solo_store
from resilient_sdk.training.rank_state import RankState
from resilient_sdk.training.rng import derive_seed, seed_everything
from resilient_sdk.training.seat import GROUP_TIMEOUT_S


class LoneSeat:
    """Rank 0 of 1. The same bits as a run of one rank under the coordinator; a fault ends it."""

    rank = 0

    def __init__(self, spec: EngineSpec, seed: int) -> None:
        self.step = 0
        self._seed = seed
        self._group = Group.form(rank=0, world_size=1, store=solo_store(), timeout_s=GROUP_TIMEOUT_S)
        self.engine: Any = engines.build(spec, solo=False, world_size=1)

    def open(self, state: RankState) -> None:
        state.own(self.rank)
        seed_everything(derive_seed(self._seed, "rank", self.rank))

    def begun(self) -> None:
        """Nobody waits for it."""

    def finished(self, _state: RankState, step: int, _seconds: float, _metrics: dict[str, float]) -> None:
        self.step = step

    def failed(self, _state: RankState, problem: BaseException) -> None:
        raise problem

    def finish(self, _state: RankState) -> bool:
        return True

    def close(self) -> None:
        engine, self.engine = self.engine, None
        engines.tear_down(engine)
        self._group.leave()
