"""`resilient demo`: a rank is killed, and nothing is lost."""

import json
from pathlib import Path
from typing import Annotated

import typer

from resilient_sdk.cli.terminal import show
from resilient_sdk.cli.words import duration
from resilient_sdk.demo.story import STEPS, Report, tell
from resilient_sdk.errors import ConfigError

_STYLES = {"title": "bold", "step": "dim", "phase": "yellow", "kill": "bold red", "note": "dim"}


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks. [default: 3, or a GPU each where there are fewer]")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps of each run.")] = STEPS,
) -> None:
    """Train a small GPT twice, kill a rank in the second run, and compare the two bit for bit."""
    if json_file is not None:
        _require_writable(json_file)
    report = tell(lambda text, style: show(text if style == "title" else f"  {text}", _STYLES[style]),
                  nproc=nproc, steps=steps)  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(report.record(), indent=1) + "\n")
    _show(report)
    raise typer.Exit(0 if report.identical else 1)


def _require_writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror}", fix="Give another file.") from problem


def _show(report: Report) -> None:
    found = report.faulted.recovery
    show("The two runs, side by side", "bold")
    if found is not None:
        inside = ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.phases.items())
        show(f"  recovery    {duration(found.seconds)} from SIGKILL to the next committed step")
        show(f"              {inside}")
    show(
        f"  a step      {duration(report.faulted.step_s)}; without a fault {duration(report.baseline.step_s)}"
    )
    show(f"  steps lost  {report.faulted.lost_steps}")
    whole = f"{report.steps} steps on {report.nproc} ranks"
    _verdict("losses", same=report.identical_losses, what=whole)
    _verdict("weights", same=report.identical_weights, what=f"sha256 {report.faulted.weights[:16]}…, fp32")


def _verdict(name: str, *, same: bool, what: str) -> None:
    word, style = ("identical", "bold green") if same else ("DIFFERENT", "bold red")
    show(f"  {name:<12}{word}: {what}", style)
