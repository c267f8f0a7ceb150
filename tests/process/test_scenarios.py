"""What a run survives. Real processes, real signals, real gloo; read it as documentation.

After each scenario the losses of every step on every rank and the final weights equal those of the run without
a fault, bit for bit, and nothing is left: no process, no shared memory.
"""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import resilient_sdk as rs
from resilient_sdk.errors import NoStandbyLeft, RunFailed
from resilient_sdk.faults import Fault
from resilient_sdk.runtime.run import Run, Status
from tests.process.kit import until
from tests.process.workload import Result, Workload, read_result

NPROC = 3
LIMIT_S = 120.0


@dataclass(frozen=True)
class Story:
    """A run that was disturbed and came to its end."""

    status: Status
    events: list[dict[str, Any]]
    result: Result

    def count(self, fact: str) -> int:
        return sum(event["fact"] == fact for event in self.events)


def launch(work: Workload, **options: Any) -> Run:
    work.out.mkdir(parents=True, exist_ok=True)
    return rs.launch(work, nproc=NPROC, **{"standbys": 1, "seed": 11, **options})


def tell(work: Workload, during: Callable[[Run], None] | None = None, **options: Any) -> Story:
    """Launches, disturbs, waits for the end."""
    run = launch(work, **options)
    try:
        if during is not None:
            during(run)
        status = run.wait(timeout_s=LIMIT_S)
    except BaseException:
        run.stop()
        raise
    return Story(status, run.events(), read_result(work.out, NPROC))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Workload], Result]:
    """The result of the same workload without a fault, run once for each kind."""
    known: dict[Workload, Result] = {}

    def result(work: Workload) -> Result:
        kind = replace(work, out=Path(), faults=())
        if kind not in known:
            clean = replace(work, out=tmp_path_factory.mktemp("undisturbed"), faults=())
            story = tell(clean, standbys=0)
            assert story.status.recoveries == 0
            known[kind] = story.result
        return known[kind]

    return result


@pytest.fixture
def work(tmp_path: Path, home: Path) -> Workload:
    return Workload(out=tmp_path / "out")


def kill(rank: int | None, at: str, step: int = 5, times: int = 1, action: str = "kill") -> dict[str, Any]:
    """A fault of the SDK's own plan, at one of its own points."""
    return Fault(at, rank, step, times, action).record()


# ---- one rank is killed ----


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_survives_a_killed_rank(stage: int, work: Workload, undisturbed: Any) -> None:
    work = replace(work, stage=stage, faults=(Fault("forward", 1, 5),))
    story = tell(work)
    assert story.result == undisturbed(work)
    assert story.status.recoveries == 1
    assert story.status.lost_steps == 0


def test_fp32_without_zero_survives(work: Workload, undisturbed: Any) -> None:
    work = replace(work, stage=0, bf16=False, faults=(Fault("backward", 1, 5),))
    assert tell(work).result == undisturbed(work)


@pytest.mark.parametrize("rank", [0, NPROC - 1])
def test_any_rank_may_die(rank: int, work: Workload, undisturbed: Any) -> None:
    story = tell(work, faults=[kill(rank, "begin")])
    assert story.result == undisturbed(work)
    assert story.status.recoveries == 1


@pytest.mark.parametrize("moment", ["data", "forward", "backward", "step"])
def test_at_any_moment_of_the_users_code(moment: str, work: Workload, undisturbed: Any) -> None:
    work = replace(work, faults=(Fault(moment, 1, 5),))
    story = tell(work)
    assert story.result == undisturbed(work)
    assert story.status.lost_steps == 0


@pytest.mark.parametrize("moment", ["capture", "captured", "upload", "manifest"])
def test_at_any_moment_of_saving(moment: str, work: Workload, undisturbed: Any) -> None:
    # Slow enough that each step is uploaded: else the first upload to strike may be the last step's.
    work = replace(work, pause_s=0.05)
    story = tell(work, faults=[kill(1, moment)])
    assert story.result == undisturbed(work)
    assert story.status.recoveries == 1
    assert story.status.lost_steps == 0


def test_in_a_data_loader_with_workers(work: Workload, undisturbed: Any) -> None:
    work = replace(work, num_workers=1)
    story = tell(work, faults=[kill(1, "begin")])
    assert story.result == undisturbed(work)


def test_before_its_first_step(work: Workload, undisturbed: Any) -> None:
    story = tell(work, faults=[kill(1, "build", step=0)])
    assert story.result == undisturbed(work)


# ---- more than one death ----


def test_during_restore(work: Workload, undisturbed: Any) -> None:
    """Rank 1 dies; while its place is taken, rank 2 dies of it."""
    story = tell(work, standbys=2, faults=[kill(1, "begin"), kill(2, "restore", step=0)])
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 2


def test_two_ranks_at_once_with_two_standbys(work: Workload, undisturbed: Any) -> None:
    story = tell(work, standbys=2, faults=[kill(0, "begin"), kill(2, "begin")])
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 2


def test_two_ranks_at_once_with_one_standby_wait_for_a_new_worker(work: Workload, undisturbed: Any) -> None:
    story = tell(work, standbys=1, faults=[kill(0, "begin"), kill(2, "begin")])
    assert story.result == undisturbed(work)


def test_the_standby_while_it_is_promoted(work: Workload, undisturbed: Any) -> None:
    story = tell(work, standbys=2, faults=[kill(1, "begin"), kill(1, "promote", step=0)])
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 2


def test_the_same_rank_three_times(work: Workload, undisturbed: Any) -> None:
    story = tell(work, faults=[kill(1, "begin", step=3), kill(1, "begin", step=5), kill(1, "begin", step=8)])
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 3


def test_the_idle_standby_is_replaced_and_nobody_waits(work: Workload, undisturbed: Any) -> None:
    work = replace(work, steps=60, pause_s=0.05)

    def during(run: Run) -> None:
        until(run, lambda s: s.standbys_ready == 1)
        started = [event for event in run.events() if event["fact"] == "WorkerStarted"]
        os.kill(started[NPROC]["pid"], signal.SIGKILL)
        until(run, lambda s: s.standbys_ready == 0)
        until(run, lambda s: s.standbys_ready == 1)

    story = tell(work, during)
    assert story.result == undisturbed(work)
    assert story.status.generation == 1


# ---- memory is lost, too ----


def test_with_its_memory_lost_every_rank_goes_back_to_what_is_committed(
    work: Workload, undisturbed: Any
) -> None:
    """Rank 2's uploads fail from step 3 on, so step 2 stays the committed one; then rank 1 dies with its memory."""

    def during(run: Run) -> None:
        status = until(run, lambda s: s.step >= 8)
        victim = status.ranks[1]
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)  # it must not capture again what is removed now
        shutil.rmtree(Path(run._directory.settings().memory) / "rank-00001")
        os.kill(victim, signal.SIGKILL)

    work = replace(work, steps=60, pause_s=0.05)
    story = tell(work, during, faults=[kill(2, "upload", step=3, times=1000, action="raise")])
    assert story.result == undisturbed(work)
    formed = [event for event in story.events if event["fact"] == "GenerationFormed"]
    assert formed[-1]["step"] == 2
    assert story.status.lost_steps == formed[-1]["lost"] >= 6


# ---- not a death ----


def test_a_stopped_rank_is_found_and_replaced(work: Workload, undisturbed: Any) -> None:
    story = tell(work, faults=[kill(1, "begin", action="stop")], stall_floor_s=1.0)
    assert story.result == undisturbed(work)
    lost = [event["cause"] for event in story.events if event["fact"] == "RankLost"]
    assert len(lost) == 1
    assert lost[0].startswith(("rank 1 gave no sign of life", "rank 1 held its peers up"))


def test_a_rank_that_hangs_in_its_own_code_is_found_among_its_peers(work: Workload, undisturbed: Any) -> None:
    work = replace(work, faults=(Fault("forward", 1, 5, action="hang"),))
    story = tell(work, stall_floor_s=1.0)
    assert story.result == undisturbed(work)
    lost = [(event["rank"], event["cause"]) for event in story.events if event["fact"] == "RankLost"]
    assert [rank for rank, _ in lost] == [1]
    assert "held its peers up" in lost[0][1]


def test_a_rank_that_exits_with_0_early_is_replaced(work: Workload, undisturbed: Any) -> None:
    work = replace(work, faults=(Fault("forward", 1, 5, action="exit"),))
    story = tell(work)
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 1


def test_a_failure_that_does_not_come_again_is_undone(work: Workload, undisturbed: Any) -> None:
    work = replace(work, faults=(Fault("forward", 1, 5, action="raise"),))
    story = tell(work)
    assert story.result == undisturbed(work)
    assert story.count("RankLost") == 0


def test_a_users_exception_ends_the_run_and_names_the_rank(work: Workload) -> None:
    work = replace(work, faults=(Fault("forward", 1, 5, times=2, action="raise"),))
    with pytest.raises(RunFailed, match="InjectedFault on rank 1 at step 4: injected at forward") as failed:
        tell(work)
    assert "in forward" in failed.value.evidence["traceback"]
    assert failed.value.exit_code == 1


# ---- nobody can take over ----


def test_without_a_standby_the_run_stops_committed_and_resumes(work: Workload, undisturbed: Any) -> None:
    with pytest.raises(NoStandbyLeft, match="step 4 is committed") as stopped:
        tell(work, standbys=0, max_restarts=0, faults=[kill(1, "begin")])
    assert "resilient run --resume" in str(stopped.value)
    run = next(rs.runs())
    status = rs.resume(run.id).wait(timeout_s=LIMIT_S)
    assert status.state == "finished"
    assert read_result(work.out, NPROC) == undisturbed(work)


def test_a_stopped_run_resumes(work: Workload, undisturbed: Any) -> None:
    work = replace(work, steps=60, pause_s=0.05)
    run = launch(work)
    until(run, lambda s: s.step >= 5)
    run.stop()
    stopped = run.status()
    assert stopped.state == "stopped"
    assert stopped.committed is not None
    assert stopped.committed >= 5
    assert rs.resume(run.id).wait(timeout_s=LIMIT_S).state == "finished"
    assert read_result(work.out, NPROC) == undisturbed(work)


# ---- the controller ----


def test_the_controller_comes_back_and_replaces_who_died_meanwhile(work: Workload, undisturbed: Any) -> None:
    work = replace(work, steps=60, pause_s=0.05)

    def during(run: Run) -> None:
        status = until(run, lambda s: s.step >= 5 and s.standbys_ready == 1)
        controller = run._directory.process("controller")
        assert controller is not None
        controller.kill()
        victim = status.ranks[1]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)

    story = tell(work, during)
    assert story.result == undisturbed(work)
    assert story.status.recoveries == 1


def test_training_goes_on_while_the_controller_is_gone(work: Workload, undisturbed: Any) -> None:
    work = replace(work, steps=60, pause_s=0.05)

    def during(run: Run) -> None:
        until(run, lambda s: s.step >= 5)
        controller = run._directory.process("controller")
        assert controller is not None
        controller.kill()
        until(run, lambda s: s.step >= 15)

    story = tell(work, during)
    assert story.result == undisturbed(work)
    assert story.status.generation == 1
