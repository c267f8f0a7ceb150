"""The processes between the controller and the workers may be killed, too: agent, zygote, and all at once."""

import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import resilient_sdk as rs
from resilient_sdk.errors import RunFailed, RunUnreachable
from resilient_sdk.runtime.processes import ProcessId
from resilient_sdk.runtime.run import Run
from tests.conftest import processes_of
from tests.process.kit import (
    NPROC,
    at_gate,
    family,
    finish,
    kill,
    launch,
    open_gates,
    process,
    undisturbed,
    until,
    wait_for,
    zygote,
)
from tests.process.workload import Workload, read_result, train


@pytest.fixture
def work(tmp_path: Path, home: Path) -> Workload:
    assert home
    return Workload(out=tmp_path / "out", gates=(5,))


def test_a_killed_agent_comes_back_and_training_goes_on_from_memory(work: Workload, tmp_path: Path) -> None:
    """All workers die with it: nobody would supervise them. The controller starts another agent."""

    def during(run: Run) -> None:
        status = at_gate(run, 5)
        process(run, "agent").kill()
        for pid in status.ranks:
            assert pid is not None
            found = ProcessId.of(pid)
            assert found is None or found.wait_gone(5.0)

    run = launch(work)
    status = finish(run, during)
    assert status.state == "finished"
    assert status.recoveries == 1
    assert status.lost_steps == 0
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")
    lost = [event["cause"] for event in run.events() if event["fact"] == "RankLost"]
    assert lost == ["vanished"] * NPROC


def test_a_killed_zygote_is_replaced_and_the_next_worker_starts(work: Workload, tmp_path: Path) -> None:
    def during(run: Run) -> None:
        status = at_gate(run, 5)
        kill(zygote(run))
        kill(status.ranks[1])
        open_gates(run, 5)
        at_gate(run, 8)

    run = launch(replace(work, gates=(5, 8)))
    status = finish(run, during)
    assert status.recoveries == 1
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")
    started = [event["worker"] for event in run.events() if event["fact"] == "WorkerStarted"]
    assert started == list(range(NPROC + 2))


def test_killed_all_at_once_the_run_is_in_memory_and_goes_on(
    work: Workload, tmp_path: Path, home: Path
) -> None:
    run = launch(replace(work, gates=(5,)))
    at_gate(run, 5)
    members = family(process(run, "agent").pid)
    agent, controller = process(run, "agent"), process(run, "controller")
    controller.kill()
    agent.kill()
    wait_for(lambda: not any(ProcessId.of(pid) for pid in members), "every worker's end", 5.0)
    assert processes_of(home) == []
    status = run.status()
    assert status.state == "killed"
    assert status.ended
    with pytest.raises(RunUnreachable, match=f"`resilient run --resume {run.id}`") as killed:
        run.wait()
    assert "\n" not in str(killed.value)
    run.stop()  # nothing to stop, and nothing to wait for

    resumed = rs.resume(run.id)
    first = until(resumed, lambda s: s.state == "running")
    assert first.lost_steps == 0
    assert finish(resumed).state == "finished"
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")
    formed = [event["step"] for event in run.events() if event["fact"] == "GenerationFormed"]
    assert formed[1] >= 5  # from memory: the newest step, whether it was committed or not


@dataclass(frozen=True)
class WithChild(Workload):
    """Each worker has a child that was forked: it holds every socket of its parent open. It ends when its parent
    has, but not before the gate is open."""

    def __call__(self, job: Any) -> None:
        child = multiprocessing.get_context("fork").Process(
            target=_linger, args=(os.getpid(), self.out / "open-5")
        )
        child.start()
        train(job, self)
        child.kill()
        child.join()


def _linger(parent: int, gate: Path) -> None:
    while os.getppid() == parent or not gate.exists():
        time.sleep(0.05)


def test_a_forked_child_of_a_dead_rank_holds_nobody_up(work: Workload, tmp_path: Path) -> None:
    """A data loader's workers hold the dead rank's channel open; its death is told by its pidfd alone."""
    forked = WithChild(out=work.out, gates=work.gates)

    def during(run: Run) -> None:
        status = at_gate(run, 5)
        assert status.ranks[1] is not None
        children = family(status.ranks[1])
        assert children
        kill(status.ranks[1])
        wait_for(lambda: not any(ProcessId.of(pid) for pid in children), "the end of its children", 2.0)

    run = launch(forked)
    status = finish(run, during)
    assert status.recoveries == 1
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")


def test_workers_that_cannot_be_started_end_the_run_and_say_why(
    work: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation: the zygote cannot import what training needs."""
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", f"{broken.parent}:{Path(__file__).parents[2]}")
    run = launch(work)
    with pytest.raises(RunFailed, match=r"no worker can be started: ImportError: libtorch\.so: no such file"):
        finish(run)
    assert run.events()[-1]["fact"] == "RunEnded"
