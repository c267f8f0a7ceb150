"""From the start command to ready-to-train: four workers through our zygote, against torchrun.

Both sides start from a command, a process of its own, and are ready when the last of four ranks has its
engine. Ours counts until the last rank has entered its first step, which is later: every rank has then gone
to the common start and has a first snapshot. Also: a replacement's time, from its fork to a warm standby.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import resilient_sdk as rs
from resilient_sdk.runtime.run import Run, runs
from tests.benchmarks.report import Report, arguments
from tests.benchmarks.rig import Bench, bench, ended, kill, torchrun, wait_for
from tests.benchmarks.work import Work, marks

NPROC = 4
FASTER = 3.0
ROOT = str(Path(__file__).resolve().parents[2])
COMMAND = "from resilient_sdk.cli import main; main()"
"""What `resilient` is, installed or not."""
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import resilient_sdk as rs
from tests.benchmarks.work import Work
Work(out={out!r}, block=1)(rs.job())
"""
"""A user's script. Its ranks wait at a gate in their first step, as the plain side's do."""


def by_command(place: Bench, number: int) -> dict[str, float]:
    """`resilient run`, as a user types it. Seconds from its start."""
    out = place.out(f"command-{number}")
    script = out / "train.py"
    script.write_text(SCRIPT.format(root=ROOT, out=str(out)))
    known = {run.id for run in runs()}
    begun, wall = time.monotonic(), time.time()
    command = [sys.executable, "-c", COMMAND, "run", "--detach", f"--nproc-per-node={NPROC}", "--standbys=0",
               str(script)]  # fmt: skip
    with (out / "log").open("ab") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ROOT})
    run = next(run for run in runs() if run.id not in known)
    with ended(run):
        return {"first step entered": _all(str(out), "begin") - begun, "formed": _formed(run) - wall}


def by_function(place: Bench, number: int) -> dict[str, float]:
    """rs.launch in a process that has imported it: a notebook."""
    work = Work(out=str(place.out(f"function-{number}")), block=1)
    begun, wall = time.monotonic(), time.time()
    with ended(rs.launch(work, nproc=NPROC, standbys=0)) as run:
        return {"first step entered": _all(work.out, "begin") - begun, "formed": _formed(run) - wall}


def by_torchrun(place: Bench, number: int) -> float:
    work = Work(out=str(place.out(f"torchrun-{number}")), block=1)
    begun = time.monotonic()
    with torchrun(work, nproc=NPROC):
        return _all(work.out, "built") - begun


def _all(out: str, what: str) -> float:
    """When the last rank did it."""

    def look() -> list[float] | None:
        found = [next((m.at for m in marks(out, r) if m.what == what), None) for r in range(NPROC)]
        return [at for at in found if at is not None] if None not in found else None

    return max(wait_for(what, look, poll_s=0.1))


def _formed(run: Run) -> float:
    return float(next(event["time"] for event in run.events() if event["fact"] == "GenerationFormed"))


def replacements(place: Bench, count: int) -> list[float]:
    """Seconds from the fork of a standby until it is warm, beside two ranks that train."""
    work = Work(out=str(place.out("replacement")), model="tiny")
    with ended(rs.launch(work, nproc=2, standbys=1)) as run:
        for number in range(count):
            wait_for("a warm standby", partial(_has_warmed, run, number + 1), poll_s=0.2)
            kill(wait_for("a pid", lambda: run.status().ranks[1], poll_s=0.2))
        wait_for("a warm standby", partial(_has_warmed, run, count + 1), poll_s=0.2)
        started = {e["worker"]: e["time"] for e in run.events() if e["fact"] == "WorkerStarted"}
        return [event["time"] - started[event["worker"]] for event in _ready(run)[1:]]


def _has_warmed(run: Run, standbys: int) -> bool:
    return len(_ready(run)) >= standbys


def _ready(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["fact"] == "StandbyReady" and event["warm"]]


def main() -> None:
    asked = arguments("Start command to ready-to-train, 4 workers, against torchrun.")
    report = Report("startup", asked.repetitions)
    ours: list[dict[str, float]] = []
    launched: list[dict[str, float]] = []
    theirs: list[float] = []
    with bench("startup") as place:
        for number in range(asked.repetitions):
            ours.append(by_command(place, number))
            theirs.append(by_torchrun(place, number))
            launched.append(by_function(place, number))
        standby = replacements(place, asked.repetitions)
    for name, found in (("resilient run", ours), ("rs.launch", launched)):
        for what in ("formed", "first step entered"):
            report.figure(f"{name}: {what}", [each[what] for each in found])
    report.figure("torchrun: engines built", theirs)
    report.figure("a replacement: forked to warm standby", standby)
    ready = median(each["first step entered"] for each in ours)
    report.bar("start to ready, times faster than torchrun", median(theirs) / ready, "x", FASTER, "higher")
    report.note("4 workers, 8.4 M parameters, ZeRO-1; the sides take turns, one repetition each")
    report.finish(asked.json)


if __name__ == "__main__":
    main()
