"""What a survivor keeps of the recoveries it lived through: memory, open files and threads of rank 0.

One run a ZeRO stage, a tiny model, three ranks. Rank 1 is killed again and again, each time when the standby
is warm; rank 0 lives through all of it. Taken from /proc when the next standby is warm, after the 5th
recovery and after the last. Each figure is the least of SAMPLES looks: an upload opens a file for a moment. The
first kill waits for the third snapshot slot, which a rank opens once, when it first captures beside an upload.
--quick: 10 recoveries.
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import resilient_sdk as rs
from resilient_sdk.checkpoint.manifest import rank_name
from resilient_sdk.ids import Rank
from resilient_sdk.runtime.run import Run, Status
from tests.benchmarks.report import Report, arguments
from tests.benchmarks.rig import Bench, bench, ended, kill, wait_for
from tests.benchmarks.work import Work

NPROC = 3
EARLY, LATE, QUICK = 5, 50, 10
WITHIN = 2.0
STAGES = (2, 3)


SAMPLES, APART_S = 20, 0.02
SLOT_S = 60.0


@dataclass(frozen=True)
class Size:
    """What a process holds."""

    rss_mib: float
    fds: int
    threads: int


def size_of(pid: int) -> Size:
    """What the process holds for good: the least of several looks."""
    seen = [_look(pid)]
    for _ in range(SAMPLES - 1):
        time.sleep(APART_S)
        seen.append(_look(pid))
    return Size(min(s.rss_mib for s in seen), min(s.fds for s in seen), min(s.threads for s in seen))


def _look(pid: int) -> Size:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return Size(
        rss_mib=int(fields["VmRSS"].split()[0]) / 1024.0,
        fds=len(os.listdir(f"/proc/{pid}/fd")),  # names only: descriptors come and go
        threads=int(fields["Threads"]),
    )


def sizes(place: Bench, stage: int, recoveries: int) -> list[Size]:
    """Rank 0's, after each recovery."""
    work = Work(out=str(place.out(f"stage-{stage}")), model="tiny", stage=stage)
    found = []
    with ended(rs.launch(work, nproc=NPROC, standbys=1, max_restarts=recoveries + 1)) as run:
        survivor = _calm(run, 0).ranks[0]
        third = Path(run.directory.settings().memory) / rank_name(Rank(0)) / "slot-2"
        with suppress(TimeoutError):  # then it counts as growth, if it is opened after the fifth
            wait_for("rank 0's third snapshot slot", third.exists, limit_s=SLOT_S, poll_s=0.1)
        for number in range(1, recoveries + 1):
            victim = _calm(run, number - 1).ranks[1]
            assert victim is not None
            kill(victim)
            status = _calm(run, number)
            if status.ranks[0] != survivor or survivor is None:
                raise RuntimeError(f"rank 0 did not live through recovery {number}")
            found.append(size_of(survivor))
    return found


def _calm(run: Run, recoveries: int) -> Status:
    """When so many recoveries are over and the standby is warm again."""

    def look() -> Status | None:
        status = run.status()
        if status.ended:
            raise RuntimeError(f"the run has ended: {status.message}")
        over = status.recoveries == recoveries and status.state == "running" and status.standbys_ready
        return status if over else None

    return wait_for("a warm standby", look, poll_s=0.1)


def tell(report: Report, stage: int, found: list[Size]) -> None:
    early, late = found[EARLY - 1], found[-1]
    for name, unit in (("rss_mib", "MiB"), ("fds", "files"), ("threads", "threads")):
        before, after = float(getattr(early, name)), float(getattr(late, name))
        report.figure(f"ZeRO-{stage}: {name} after recovery {EARLY}", [before], unit)
        report.figure(f"ZeRO-{stage}: {name} after recovery {len(found)}", [after], unit)
        report.figure(f"ZeRO-{stage}: {name}, all recoveries", [getattr(size, name) for size in found], unit)
        growth = (after / before - 1.0) * 100.0
        report.bar(f"ZeRO-{stage}: growth of {name}", growth, "%", WITHIN, "lower")


def main() -> None:
    asked = arguments("What a survivor keeps of 50 recoveries.")
    recoveries = QUICK if asked.quick else LATE
    report = Report("leak", recoveries)
    with bench("leak") as place:
        for stage in STAGES:
            tell(report, stage, sizes(place, stage, recoveries))
    report.note("the repetitions are recoveries of one run; rank 0 lives through all of them")
    report.note(f"each figure is the least of {SAMPLES} looks; the first kill waits until rank 0 has opened its "
                "third snapshot slot, once and for good")  # fmt: skip
    report.finish(asked.json)


if __name__ == "__main__":
    main()
