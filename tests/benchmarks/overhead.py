"""What a snapshot every step, and its upload, cost when nothing happens: ours against plain DeepSpeed.

Three ranks, ZeRO-1, the demo's GPT of 8.4 M parameters, gloo, one thread a process. All sides live at once
and train by turns: a side runs one block of steps while the others wait at their gates, so that a pair of
blocks sees the same machine. Neither the first step of a block counts, nor the first block of a side.

    ours          a snapshot of each step into shared memory, uploads to the default store (files of the run)
    slow store    the same, but each put of the store takes SLOW_PUT_S: no upload keeps up with the steps
    plain         the same loop under torchrun with nothing of the SDK's, and no checkpoint at all
"""

import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import resilient_sdk as rs
from resilient_sdk.runtime.run import Run
from tests.benchmarks.report import Report, arguments
from tests.benchmarks.rig import Bench, bench, ended, torchrun, wait_for
from tests.benchmarks.work import Work, marks

NPROC = 3
CONTEXT = 128
SLOW_PUT_S = 2.0
WITHIN = 5.0
SETTLE_S = 0.5
OURS, SLOW, PLAIN = "ours", "slow store", "plain"


@dataclass(frozen=True)
class Load:
    """How much a step has to compute, and how many steps make a block."""

    name: str
    samples: int
    block: int

    @property
    def tokens(self) -> int:
        return self.samples * CONTEXT


@dataclass(frozen=True)
class Step:
    """A block's mean step: its length, and the processor seconds of all ranks with their uploads."""

    seconds: float
    cpu: float


REALISTIC = Load("2048 tokens", samples=16, block=6)
FEW = Load("128 tokens", samples=1, block=16)


def measure(report: Report, place: Bench, load: Load, sides: tuple[str, ...]) -> None:
    blocks = report.repetitions + 1
    works = {
        side: Work(
            out=str(place.out(f"{side.split()[0]}-{load.samples}")),
            model="gpt", samples=load.samples, length=CONTEXT, block=load.block, steps=blocks * load.block,
            slow_s=SLOW_PUT_S if side == SLOW else 0.0,
        )
        for side in sides
    }  # fmt: skip
    skipped: dict[str, int] = {}
    with ExitStack() as stack:
        runs = {side: stack.enter_context(_start(side, work)) for side, work in works.items()}
        times: dict[str, list[Step]] = {side: [] for side in sides}
        for block in range(blocks):
            for side in sides if block % 2 else reversed(sides):
                times[side].append(_run_block(works[side], block))
        for side, run in runs.items():
            if isinstance(run, Run):
                skipped[side] = run.status().skipped_uploads
    _tell(report, load, works, times, skipped)


def _start(side: str, work: Work) -> AbstractContextManager[Any]:
    if side == PLAIN:
        return torchrun(work, nproc=NPROC)
    return ended(rs.launch(work, nproc=NPROC, standbys=0, stall_floor_s=3600.0))


def _run_block(work: Work, block: int) -> Step:
    """Opens the gate and waits for the block's end. Returns its mean step, the first left out."""
    first, last = block * work.block + 1, (block + 1) * work.block

    def waiting() -> bool:
        return all(
            any(m.what == "begin" and m.step == first for m in marks(work.out, r)) for r in range(NPROC)
        )

    def done() -> bool:
        return all(any(m.what == "step" and m.step == last for m in marks(work.out, r)) for r in range(NPROC))

    wait_for("the gate", waiting, poll_s=0.1)
    time.sleep(SETTLE_S)
    (Path(work.out) / f"gate-{block}").touch()
    wait_for("the block's end", done, poll_s=0.1)
    ends = [{m.step: m for m in marks(work.out, rank) if m.what == "step"} for rank in range(NPROC)]
    count = last - first
    return Step(
        seconds=fmean((each[last].at - each[first].at) / count for each in ends),
        cpu=sum((each[last].cpu - each[first].cpu) / count for each in ends),
    )


def _tell(
    report: Report, load: Load, works: dict[str, Work], times: dict[str, list[Step]], skipped: dict[str, int]
) -> None:
    plain = times[PLAIN][1:]
    report.figure(f"{load.name}: plain: step", [step.seconds for step in plain])
    report.figure(f"{load.name}: plain: processor time", [step.cpu for step in plain], "s a step")
    for side in (side for side in works if side != PLAIN):
        own, name = times[side][1:], f"{load.name}: {side}"
        pairs = list(zip(own, plain, strict=True))
        more = [(mine.seconds / theirs.seconds - 1.0) * 100.0 for mine, theirs in pairs]
        busy = [(mine.cpu / theirs.cpu - 1.0) * 100.0 for mine, theirs in pairs]
        report.figure(f"{name}: step", [step.seconds for step in own])
        report.figure(f"{name}: step above plain", more, "%")
        report.figure(f"{name}: processor time above plain", busy, "%")
        report.figure(f"{name}: capture and report alone", _captures(works[side]), "ms a step")
        report.figure(f"{name}: uploads skipped", [skipped[side]], f"of {works[side].steps} steps")
        if load == REALISTIC:
            report.bar(f"a step with {side} above plain", median(more), "%", WITHIN, "lower")
        if side == SLOW:
            report.bar("uploads skipped and counted with a slow store", skipped[side], "steps", 1, "higher")


def _captures(work: Work) -> list[float]:
    """Milliseconds from the end of the user's block to the end of `with step`: snapshot and report."""
    found = []
    for rank in range(NPROC):
        ends = {mark.step: mark.at for mark in marks(work.out, rank) if mark.what == "step"}
        found += [(m.at - ends[m.step]) * 1000.0 for m in marks(work.out, rank)
                  if m.what == "left" and m.step > work.block]  # fmt: skip
    return found


def main() -> None:
    asked = arguments("Steady-state step time with a snapshot every step, against plain DeepSpeed.")
    report = Report("overhead", asked.repetitions)
    report.note(f"3 ranks, ZeRO-1, GPT of 8.4 M parameters, bf16, {REALISTIC.tokens} tokens a rank and step; "
                f"{FEW.tokens} are the worst case, without a bar: the cost goes by the state's bytes, not by "
                "the tokens")  # fmt: skip
    report.note(f"slow store: {SLOW_PUT_S:g} s a put")
    with bench("overhead") as place:
        measure(report, place, REALISTIC, (OURS, PLAIN, SLOW))
        measure(report, place, FEW, (OURS, PLAIN))
    report.finish(asked.json)


if __name__ == "__main__":
    main()
