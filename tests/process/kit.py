"""Runs for tests: launch one, disturb it, wait for its end, compare its bits."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import resilient_sdk as rs
from resilient_sdk.runtime.processes import ProcessId
from resilient_sdk.runtime.run import Run, Status
from tests.process.workload import Result, Workload, read_result

NPROC = 2
LIMIT_S = 120.0

_undisturbed: dict[Workload, Result] = {}
_works: dict[str, Workload] = {}


def launch(work: Workload, **options: Any) -> Run:
    """Starts a workload; two ranks, for two cores."""
    work.out.mkdir(parents=True, exist_ok=True)
    run = rs.launch(work, **{"nproc": NPROC, "standbys": 1, "seed": 11, "stall_floor_s": LIMIT_S, **options})
    _works[run.id] = work
    return run


def finish(run: Run, during: Callable[[Run], None] | None = None) -> Status:
    """Disturbs a run, opens its gate and waits for its end; whatever fails, the run is ended."""
    try:
        if during is not None:
            during(run)
        open_gates(run)
        return run.wait(timeout_s=LIMIT_S)
    except BaseException:
        run.stop()
        raise


def at_gate(run: Run, gate: int) -> Status:
    """Waits until every rank is at a gate, and a standby is warm if there is to be one."""
    standbys = run.directory.settings().standbys
    return until(run, lambda s: s.step == gate and s.standbys_ready == standbys and s.state == "running")


def open_gates(run: Run, *gates: int) -> None:
    """Opens some gates of a run, or all."""
    work = _works[run.id]
    for gate in gates or work.gates:
        (work.out / f"open-{gate}").touch()


def until(run: Run, condition: Callable[[Status], bool]) -> Status:
    """Waits for a run to come to a point."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = run.status()
        if condition(status) or status.ended:
            return status
        time.sleep(0.005)
    raise AssertionError(f"never happened: {run.status()}")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Waits until `condition` returns something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def undisturbed(work: Workload, out: Path) -> Result:
    """The result of the same workload without a fault, run once a session for each kind."""
    kind = Workload(out=Path(), stage=work.stage, accumulation=work.accumulation, steps=work.steps, bf16=work.bf16,
                    num_workers=work.num_workers)  # fmt: skip
    if kind not in _undisturbed:
        assert finish(launch(replace(kind, out=out), standbys=0)).recoveries == 0
        _undisturbed[kind] = read_result(out, NPROC)
    return _undisturbed[kind]


def process(run: Run, name: str) -> ProcessId:
    """The run's living controller or agent."""
    found = run.directory.process(name)
    assert found is not None
    return found


def family(pid: int) -> dict[int, str]:
    """Living descendants of a process: pid -> command line."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: _command_line(child) for child in found - {pid}}


def zygote(run: Run) -> int:
    """The pid of the run's zygote: the child of the agent that started it."""
    agent = process(run, "agent").pid
    return wait_for(
        lambda: next((p for p, line in family(agent).items() if ".zygote" in line and _parent(p) == agent
                      and p not in _workers(run)), None),
        "a zygote",
    )  # fmt: skip


def _workers(run: Run) -> set[int]:
    return {event["pid"] for event in run.events() if event["fact"] == "WorkerStarted"}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int | None) -> None:
    """SIGKILL."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
