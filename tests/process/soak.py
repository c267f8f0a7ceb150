"""A storm: for some minutes every few seconds one process of a run is killed or stopped, whichever it is.

    python tests/process/soak.py [--minutes 5] [--seed 1] [--json FILE]

Ranks, standbys, the zygote, the agent and the controller are all fair game. At the end the losses and the weights
must be those of a quiet run. Not part of `make test`: it takes as long as it is told to.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import resilient_sdk as rs
from resilient_sdk.runtime.run import Run
from tests.process.workload import Workload, read_result

NPROC = 3


def victims(run: Run) -> dict[str, int]:
    """Every process of the run by name."""
    found: dict[str, int] = {}
    status = run.status()
    for rank, pid in enumerate(status.ranks):
        if pid:
            found[f"rank {rank}"] = pid
    started = {event["worker"]: event["pid"] for event in run.events() if event["fact"] == "WorkerStarted"}
    for worker, pid in started.items():
        if pid not in found.values() and Path(f"/proc/{pid}").exists():
            found[f"standby {worker}"] = pid
    for name in ("controller", "agent"):
        process = run._directory.process(name)
        if process is not None:
            found[name] = process.pid
    return found


def storm(run: Run, until: float, chance: random.Random) -> list[str]:
    """Strikes until the time is up or the run has ended; returns what it did."""
    done = []
    while time.monotonic() < until and not run.status().ended:
        time.sleep(chance.uniform(0.2, 4.0))
        known = sorted(victims(run).items())
        # An agent takes all its workers with it: struck as often as the rest, nothing would ever train.
        weights = [0.3 if name in ("agent", "controller") else 1.0 for name, _ in known]
        target, pid = chance.choices(known, weights)[0]
        stop = target.startswith("rank") and chance.random() < 0.1
        try:
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        except ProcessLookupError:
            continue
        done.append(f"{'stopped' if stop else 'killed'} {target}")
        print(f"{time.strftime('%H:%M:%S')} step {run.status().step}: {done[-1]}", flush=True)
    return done


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ.update(RESILIENT_HOME=scratch + "/home", RESILIENT_MEMORY=memory)
        report = weather(Path(scratch), given.minutes, given.seed)
    print(json.dumps(report, indent=1))
    if given.json:
        given.json.write_text(json.dumps(report))
    return 0 if report["identical"] else 1


def weather(scratch: Path, minutes: float, seed: int) -> dict[str, Any]:
    steps = int(minutes * 60 / 0.12)
    work = Workload(out=scratch / "storm", steps=steps, pause_s=0.02)
    work.out.mkdir()
    run = rs.launch(work, nproc=NPROC, standbys=2, seed=seed, max_restarts=10_000, stall_floor_s=2.0)
    strikes = storm(run, time.monotonic() + minutes * 60, random.Random(seed))
    status = run.wait(timeout_s=minutes * 120 + 300)
    calm = replace(work, out=scratch / "calm", pause_s=0.0)
    calm.out.mkdir()
    rs.launch(calm, nproc=NPROC, standbys=0, seed=seed).wait(timeout_s=minutes * 60 + 300)
    left = list(Path(os.environ["RESILIENT_MEMORY"]).iterdir())
    same = read_result(work.out, NPROC) == read_result(calm.out, NPROC)
    return {
        "identical": same, "strikes": len(strikes), "recoveries": status.recoveries, "steps": status.step,
        "lost_steps": status.lost_steps, "left": [str(path) for path in left], "kinds": _count(strikes),
    }  # fmt: skip


def _count(strikes: list[str]) -> dict[str, int]:
    kinds = [strike.rstrip("0123456789 ") for strike in strikes]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


if __name__ == "__main__":
    sys.exit(main())
