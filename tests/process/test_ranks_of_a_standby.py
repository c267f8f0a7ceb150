"""What a standby's code gets where a rank's would get its number: never a wrong one, and nobody waits for it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from resilient_sdk.runtime.run import Run, Status
from tests.process.kit import NPROC, at_gate, finish, kill, launch, open_gates, undisturbed, until
from tests.process.workload import Workload, read_result, train

Ask = Callable[[Any, Any], Any]


def _torch(_job: Any, _engine: Any) -> Any:
    import torch.distributed as dist

    return dist.get_rank()


def _torch_by_name(_job: Any, _engine: Any) -> Any:
    from torch.distributed import get_rank

    return get_rank()


def _deepspeed(_job: Any, _engine: Any) -> Any:
    from deepspeed import comm

    return comm.get_rank()


def _sizes(_job: Any, engine: Any) -> Any:
    import torch.distributed as dist

    return [int(os.environ["WORLD_SIZE"]), dist.get_world_size(), engine.world_size, engine.train_batch_size(),
            engine.gradient_accumulation_steps()]  # fmt: skip


RIGHT = [1, 1, 1, 8, 2]
"""Of a job of one rank with two micro-batches of 4."""
ASKS: dict[str, tuple[str, Ask, Any]] = {
    "job.rank, before": ("before", lambda job, _: job.rank, "NeedsRank"),
    "is_standby, before": ("before", lambda job, _: job.is_standby, True),
    "RANK, before": ("before", lambda *_: int(os.environ["RANK"]), "ValueError"),
    "LOCAL_RANK or 0, before": ("before", lambda *_: int(os.environ.get("LOCAL_RANK", "0")), "ValueError"),
    "RANK or 0, between": ("between", lambda *_: int(os.environ.get("RANK", "0")), "ValueError"),
    "job.rank, between": ("between", lambda job, _: job.rank, "NeedsRank"),
    "torch, between": ("between", _torch, "NeedsRank"),
    "torch by name, between": ("between", _torch_by_name, "NeedsRank"),
    "deepspeed, between": ("between", _deepspeed, "NeedsRank"),
    "engine.global_rank, between": ("between", lambda _, engine: engine.global_rank, "NeedsRank"),
    "sizes, between": ("between", _sizes, RIGHT),
    "job.rank, in the step": ("inside", lambda job, _: job.rank, "NeedsRank"),
    "RANK, in the step": ("inside", lambda *_: int(os.environ["RANK"]), "ValueError"),
    "torch, in the step": ("inside", _torch, "NeedsRank"),
}


@dataclass(frozen=True)
class Asking(Workload):
    """Standby number n asks what stands n-th in `asks`, and writes down what it got."""

    asks: tuple[str, ...] = ()

    def __call__(self, job: Any) -> None:
        train(_AskingJob(job, self), self)


class _AskingJob:
    """A job that asks for its rank where the user's code might."""

    def __init__(self, job: Any, work: Asking) -> None:
        self._job, self._work, self._engine = job, work, None
        worker = job._member.context.worker
        standby = worker - job.world_size
        self._name = work.asks[standby] if job.is_standby and 0 <= standby < len(work.asks) else ""

    def initialize(self, **arguments: Any) -> Any:
        self._ask("before")
        self._engine = self._job.initialize(**arguments)
        self._ask("between")
        return self._engine

    @property
    def is_standby(self) -> bool:
        self._ask("inside")
        return bool(self._job.is_standby)

    def _ask(self, where: str) -> None:
        if not self._name or ASKS[self._name][0] != where or not self._job.is_standby:
            return
        path = self._work.out / f"asked-{self._name.replace(' ', '_')}"
        try:
            got = ASKS[self._name][1](self._job, self._engine)
        except BaseException as problem:
            path.write_text(json.dumps(type(problem).__name__))
            raise
        path.write_text(json.dumps(got))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


@pytest.fixture
def out(tmp_path: Path, home: Path) -> Path:
    assert home
    return tmp_path / "out"


def settled(run: Run) -> Status:
    """Every standby is ready, warm or cold."""
    return until(
        run, lambda s: s.step == 5 and s.state == "running" and not any("warming" in x for x in s.standbys)
    )


def test_whoever_asks_a_standby_gets_no_wrong_number(out: Path) -> None:
    """One rank, and a standby for each way to ask."""
    notes: list[str] = []
    run = launch(Asking(out=out, gates=(5,), asks=tuple(ASKS)), nproc=1, standbys=len(ASKS))
    finish(run, lambda run: notes.extend(settled(run).standbys))
    for name, (_, _, right) in ASKS.items():
        assert json.loads((out / f"asked-{name.replace(' ', '_')}").read_text()) == right, name
    where = f"{__file__}:"
    for name, (place, _, right) in ASKS.items():
        worker = f"worker {1 + list(ASKS).index(name)} is ready but cold: "
        lines = [note for note in notes if note.startswith(worker)]
        if isinstance(right, str):
            assert len(lines) == 1, name
            assert where in lines[0] or "workload.py:" in lines[0]
            assert ("its rehearsal ended early" in lines[0]) == (place == "inside")
            assert (" was " in lines[0]) == (right == "NeedsRank")
        else:
            assert lines == []  # warm


def test_a_cold_standby_is_promoted_and_the_bits_are_the_same(out: Path, tmp_path: Path) -> None:
    """Its code runs from the top, with its rank: as if the rank had been born there."""

    def during(run: Run) -> None:
        status = settled(run)
        assert status.standbys_ready == 0
        assert "job.rank was read at" in status.standbys[0]
        kill(status.ranks[1])

    run = launch(Asking(out=out, gates=(5,), asks=("job.rank, before",)))
    status = finish(run, during)
    assert (status.recoveries, status.lost_steps) == (1, 0)
    assert read_result(out, NPROC) == undisturbed(Workload(out=out), tmp_path / "clean")
    promoted = [event for event in run.events() if event["fact"] == "StandbyPromoted"]
    assert [(event["worker"], event["warm"]) for event in promoted] == [(NPROC, False)]


@dataclass(frozen=True)
class Remembering(Workload):
    """Keeps from before the first step what only the whole job's answer may be; checks it at every step."""

    def __call__(self, job: Any) -> None:
        train(_RememberingJob(job), self)


class _RememberingJob:
    def __init__(self, job: Any) -> None:
        self._job = job
        self._kept: Any = None

    def initialize(self, **arguments: Any) -> Any:
        engine = self._job.initialize(**arguments)
        self._kept = (_sizes(self._job, engine), engine)
        return engine

    @property
    def rank(self) -> int:
        rank = int(self._job.rank)
        sizes, engine = self._kept
        assert sizes == _sizes(self._job, engine) == [NPROC, NPROC, NPROC, 8 * NPROC, 2]
        assert rank == _torch(None, None) == _deepspeed(None, None) == engine.global_rank
        assert rank == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
        return rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


def test_what_a_warm_standby_keeps_is_right_when_it_has_a_rank(out: Path, tmp_path: Path) -> None:
    """Also in the ranks that were there from the start, and after the block and the loop."""

    def during(run: Run) -> None:
        kill(at_gate(run, 5).ranks[0])
        open_gates(run, 5)
        kill(at_gate(run, 8).ranks[1])

    run = launch(Remembering(out=out, gates=(5, 8)))
    status = finish(run, during)
    assert (status.recoveries, status.lost_steps) == (2, 0)
    assert read_result(out, NPROC) == undisturbed(replace(Workload(out=out)), tmp_path / "clean")
    assert all(event["warm"] for event in run.events() if event["fact"] == "StandbyPromoted")
