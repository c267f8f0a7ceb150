"""From SIGKILL of a rank to the next committed step: ours against torchrun with save_checkpoint.

Three ranks, eight Linear of 1024 x 1024 in bf16 (8.4 M parameters), gloo, one thread a process. The clock
starts when this process sends SIGKILL to rank 1, on both sides alike, and stops:
    ours       when the store's head names the next step (which every rank has then finished)
    torchrun   when every rank has run the next step and save_checkpoint of it has returned
Ours commits to files on disk, torchrun (--max-restarts, save_checkpoint every step) saves into shared memory.
One run a side and stage; each repetition is one kill in it, at least STEADY_PLAIN steps after the one before,
on our side STEADY steps after the standby was warm again.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import resilient_sdk as rs
from resilient_sdk.runtime.run import Run, Status
from tests.benchmarks.report import Report, arguments
from tests.benchmarks.rig import Bench, bench, ended, kill, torchrun, wait_for
from tests.benchmarks.work import Mark, Work, marks

NPROC = 3
VICTIM = 1
STEADY = 10
STEADY_PLAIN = 4
FASTER = {1: 20.0, 2: 20.0, 3: 10.0}
BEYOND_A_STEP_S = {1: 0.4, 2: 0.4, 3: 0.8}


@dataclass
class Side:
    """One side's recoveries: seconds by phase, a dict a kill; and step times without a fault."""

    phases: list[dict[str, float]]
    steps: list[float]

    def total(self) -> list[float]:
        return [phases["total"] for phases in self.phases]


# ---- ours


def ours(place: Bench, stage: int, kills: int) -> Side:
    work = Work(out=str(place.out(f"ours-{stage}")), stage=stage)
    side = Side([], [])
    with ended(rs.launch(work, nproc=NPROC, standbys=1, max_restarts=kills + 1, stall_floor_s=300.0)) as run:
        for _ in range(kills):
            pid = _when_steady(run)
            seen = len(run.events())
            wall_ahead = time.time() - time.monotonic()
            at = kill(pid)
            # Nobody asks the controller anything meanwhile: that would take its time.
            time.sleep(0.2)
            events = wait_for("the next committed step", partial(_recovered, run, seen), poll_s=0.1)
            side.steps += _periods(marks(work.out, 0), at)[-STEADY:]
            side.phases.append(_phases(events, at, wall_ahead))
    return side


def _when_steady(run: Run) -> int:
    """The victim's pid, when the standby is warm and STEADY steps have run since."""

    def warm() -> Status | None:
        status = run.status()
        if status.ended:
            raise RuntimeError(f"the run has ended: {status.message}")
        return status if status.standbys_ready and status.state == "running" else None

    first: int = wait_for("a warm standby", warm, poll_s=0.2).step
    status = wait_for(
        "some steps", lambda: s if (s := run.status()).step >= first + STEADY + 1 else None, poll_s=0.2
    )
    pid = status.ranks[VICTIM]
    assert pid is not None  # the run is running
    return pid


def _recovered(run: Run, seen: int) -> dict[str, dict[str, Any]] | None:
    """The first of each kind since the kill, when the last of them has come."""
    new = run.events()[seen:]
    formed = next((e for e in new if e["fact"] == "GenerationFormed"), None)
    if formed is None:
        return None
    found: dict[str, dict[str, Any]] = {}
    for event in new:
        if event["fact"] != "HeadMoved" or event["generation"] == formed["generation"]:
            found.setdefault(event["fact"], event)
    return found if {"RecoveryFinished", "HeadMoved"} <= set(found) else None


def _phases(events: dict[str, dict[str, Any]], killed: float, wall_ahead: float) -> dict[str, float]:
    at = {name: event["time"] - wall_ahead - killed for name, event in events.items()}
    died = events["WorkerExited"]["at"] - killed
    parts = events["GenerationFormed"]["phases"]
    finished, committed = at["RecoveryFinished"], max(at["RecoveryFinished"], at["HeadMoved"])
    return {
        "detect": died,
        "decide": at["GenerationBroken"] - died,
        # A standby's wait began when it was ready, long before the kill.
        **{f"re-form: {name}": seconds for name, seconds in parts.items() if name != "wait"},
        "re-form": at["GenerationFormed"] - at["GenerationBroken"],
        "replay": finished - at["GenerationFormed"],
        "commit": committed - finished,
        "step in memory": finished,
        "total": committed,
    }


# ---- torchrun


def plain(place: Bench, stage: int, kills: int) -> Side:
    out = place.out(f"plain-{stage}")
    checkpoint = place.memory / f"plain-{stage}"
    work = Work(out=str(out), stage=stage, checkpoint=str(checkpoint))
    side = Side([], [])
    with torchrun(work, nproc=NPROC, restarts=kills) as process:

        def saved(since: float, count: int) -> list[list[Mark]] | None:
            """Every rank's marks of its present life, when all have saved `count` steps in it."""
            if process.poll() is not None:
                raise RuntimeError(f"torchrun has ended: {(out / 'log').read_text()[-2000:]}")
            lives = [_life(marks(out, rank), since) for rank in range(NPROC)]
            return lives if all(sum(m.what == "saved" for m in life) >= count for life in lives) else None

        at = 0.0
        for _ in range(kills):
            wait_for("some steps", partial(saved, at, STEADY_PLAIN), poll_s=0.1)
            at = kill(int((out / f"pid-{VICTIM}").read_text()))
            lives = wait_for("the next saved step", partial(saved, at, 1), poll_s=0.1)
            side.phases.append(_plain_phases(lives, at))
        wait_for("some steps", partial(saved, at, STEADY_PLAIN), poll_s=0.1)
        side.steps = _periods(marks(out, 0), float("inf"))
    return side


def _life(all_marks: list[Mark], since: float) -> list[Mark]:
    """From the first start after `since`."""
    start = next((n for n, mark in enumerate(all_marks) if mark.what == "start" and mark.at > since), None)
    return [] if start is None else all_marks[start:]


def _plain_phases(lives: list[list[Mark]], killed: float) -> dict[str, float]:
    def last(what: str) -> float:
        return max(next(mark.at for mark in life if mark.what == what) for life in lives) - killed

    start, built, loaded, stepped, saved = (last(w) for w in ("start", "built", "loaded", "step", "saved"))
    return {
        "detect, respawn, import": start,
        "build": built - start,
        "load": loaded - built,
        "first step": stepped - loaded,
        "save": saved - stepped,
        "total": saved,
    }


def _periods(of_rank: list[Mark], until: float) -> list[float]:
    """Seconds from each step's end to the next one's, where both ran without a break between."""
    ends = [mark for mark in of_rank if mark.what in ("step", "start", "loaded") and mark.at < until]
    return [
        later.at - earlier.at
        for earlier, later in pairwise(ends)
        if earlier.what == later.what == "step" and later.step == earlier.step + 1
    ]


# ---- both


def measure(report: Report, place: Bench, stage: int) -> None:
    mine, theirs = ours(place, stage, report.repetitions), plain(place, stage, report.repetitions)
    for name, side in (("ours", mine), ("torchrun", theirs)):
        for phase in dict.fromkeys(phase for phases in side.phases for phase in phases):
            values = [phases[phase] for phases in side.phases if phase in phases]
            report.figure(f"ZeRO-{stage} {name}: {phase}", values)
        report.figure(f"ZeRO-{stage} {name}: step", side.steps)
    total, step = median(mine.total()), median(mine.steps)
    faster = median(theirs.total()) / total
    report.bar(f"ZeRO-{stage}: times faster than torchrun", faster, "x", FASTER[stage], "higher")
    report.bar(f"ZeRO-{stage}: recovery beyond one step", total - step, "s", BEYOND_A_STEP_S[stage], "lower")


def main() -> None:
    asked = arguments("Kill to next committed step, against torchrun.")
    report = Report("recovery", asked.repetitions)
    report.note("3 ranks, 8.4 M parameters, bf16, gloo, one thread a process; ours has a warm standby and "
                "commits to files on disk, torchrun saves every step into shared memory")  # fmt: skip
    report.note("re-form: its parts are the slowest member's each, so they may add up to more than the whole")
    with bench("recovery") as place:
        for stage in (1, 2, 3):
            measure(report, place, stage)
    report.finish(asked.json)


if __name__ == "__main__":
    main()
