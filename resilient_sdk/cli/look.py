"""`resilient ps`, `status` and `logs`: looking without touching."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from resilient_sdk.cli.run import RunArgument
from resilient_sdk.cli.terminal import out, say, show, show_table
from resilient_sdk.cli.words import duration
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.errors import CheckpointError
from resilient_sdk.runtime.run import Run, Status, attach, runs
from resilient_sdk.runtime.tail import RankTail

FOLLOW_S = 0.1


def ps() -> None:
    """List your runs on this machine."""
    rows = [_row(run) for run in runs()]
    if rows:
        show_table(("RUN", "STATE", "STEP", "RANKS", "STANDBYS READY", "AGE"), rows)
    else:
        say("no runs")


def _row(run: Run) -> tuple[str, ...]:
    age = SYSTEM_CLOCK.wall() - run.launched_at
    try:
        s = run.glance()
    except CheckpointError:
        return (run.id, "newer format", "-", "-", "-", duration(age))
    owned = sum(pid is not None for pid in s.ranks)
    alive = run.directory.alive()
    ranks = f"{owned}/{len(s.ranks)}" if alive else "-"
    return (s.run, _state(run, s), str(s.step), ranks, str(s.standbys_ready) if alive else "-", duration(age))


def _state(run: Run, s: Status) -> str:
    return s.state if s.ended or run.directory.alive() else "killed"


def status(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what is known of a run now."""
    found = attach(run)
    s = found.status()
    if as_json:
        out.print(json.dumps({**dataclasses.asdict(s), "state": _state(found, s)}))
        return
    for name, text in _facts(found, s):
        if text:
            show(f"{name:<11}{text}")


def _facts(run: Run, s: Status) -> list[tuple[str, str]]:
    alive = run.directory.alive()
    pids = (f"{rank}: {'nobody' if pid is None else f'pid {pid}'}" for rank, pid in enumerate(s.ranks))
    committed = "nothing committed" if s.committed is None else f"{s.committed} committed"
    return [
        ("run", s.run),
        ("state", f"{_state(run, s)}, generation {s.generation}"),
        ("step", f"{s.step}, {committed}" + (f", {duration(s.step_s)} a step" if s.step_s else "")),
        ("ranks", ", ".join(pids) if alive else ""),
        ("standbys", "; ".join((f"{s.standbys_ready} ready", *s.standbys)) if alive else ""),
        ("faults", f"{s.recoveries} survived, {s.lost_steps} steps run again" if s.recoveries else ""),
        ("uploads", f"{s.skipped_uploads} skipped, the store was behind" if s.skipped_uploads else ""),
        ("reported", ", ".join(f"{name} {value:.6g}" for name, value in s.metrics.items())),
        ("message", s.message),
        ("directory", str(run.directory.path)),
    ]  # fmt: skip


def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(metavar="R", help="Whose output.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the run has ended, or Ctrl-C.")
    ] = False,
) -> None:
    """Print what a rank has printed, through all workers that owned it."""
    found = attach(run)
    if not follow:
        sys.stdout.write(found.logs(rank))
        return
    found.require_rank(rank)
    tail = RankTail(found.directory, rank)
    ended = False
    while not ended:
        ended = not found.directory.alive()
        sys.stdout.write(tail.read())
        sys.stdout.flush()
        if not ended:
            SYSTEM_CLOCK.sleep(FOLLOW_S)
