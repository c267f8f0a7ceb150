"""`resilient run`, `attach` and `stop`: starting a run, getting at it again, ending it."""

from collections.abc import Callable
from typing import Annotated

import typer

from resilient_sdk.cli.follow import Follower, held_interrupts, say_detached
from resilient_sdk.cli.options import processes, require_one_node, size
from resilient_sdk.cli.terminal import say, show
from resilient_sdk.cli.words import progress
from resilient_sdk.errors import ConfigError
from resilient_sdk.runtime.run import Run, launch, resume
from resilient_sdk.runtime.run import attach as attach_to

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `resilient ps` shows it.")]


def run(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, which asks `rs.job()` for its job.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="The script's own, passed on untouched.")
    ] = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node", "--nproc", metavar="N", help="Ranks: a number, cpu, gpu or auto. [default: 1]"
        ),
    ] = None,
    standbys: Annotated[int, typer.Option(metavar="N", help="Warm workers that wait to take over.")] = 1,
    max_restarts: Annotated[int, typer.Option(metavar="N", help="Dead workers that are replaced.")] = 100,
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="[default: a new one]")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where committed states go. [default: with the run]")
    ] = None,
    store_budget: Annotated[str, typer.Option(metavar="SIZE", help="What may be kept there.")] = "8G",
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything random.")] = 0,
    stall_floor: Annotated[
        float, typer.Option(metavar="SECONDS", help="No step counts as hung before.")
    ] = 30.0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the run's id and leave it.")] = False,
    resume_run: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run that has ended.")
    ] = None,
    nnodes: Annotated[str, typer.Option(metavar="N", help="1: one machine so far.")] = "1",
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,  # noqa: ARG001
) -> None:
    """Train a script that survives killed ranks, and follow it live.

    The first Ctrl-C detaches; the run goes on.
    """
    require_one_node(nnodes)
    if resume_run is not None:
        if script is not None:
            raise ConfigError(f"run {resume_run} knows its script", fix="Leave the script out with --resume.")
        asked = None if nproc is None else processes(nproc)
        follower = Follower(attach_to(resume_run), from_now=True)
        _start(lambda: resume(resume_run, nproc=asked), follower, detach=detach)
        return
    if script is None:
        raise ConfigError("there is no script", fix="Write `resilient run SCRIPT`, or `--resume RUN`.")
    ranks, budget = processes(nproc or "1"), size(store_budget)
    _start(
        lambda: launch(
            script=script, arguments=arguments or (), module=module, run_id=run_id, nproc=ranks,
            standbys=standbys, max_restarts=max_restarts, store=store, store_budget_bytes=budget,
            seed=seed, stall_floor_s=stall_floor,
        ),
        None, detach=detach,
    )  # fmt: skip


def _start(begin: Callable[[], Run], follower: Follower | None, *, detach: bool) -> None:
    with held_interrupts() as pressed:
        started = begin()
    if detach:
        show(started.id)
        return
    if pressed:
        say_detached(started)
        return
    say(f"run {started.id}", "bold")
    raise typer.Exit((follower or Follower(started)).follow())


def attach(run: RunArgument) -> None:
    """Follow a run from now on. Ctrl-C detaches again; the exit status is the run's."""
    found = attach_to(run)
    say(f"run {found.id}: {progress(found.glance())}", "bold")
    raise typer.Exit(Follower(found, from_now=True).follow())


def stop(run: RunArgument) -> None:
    """End a run with its state committed, so that it can be resumed."""
    found = attach_to(run)
    was_alive = found.directory.alive()
    found.stop()
    status = found.status()
    if not was_alive:
        ended = status.message if status.ended else f"its processes are gone since step {status.step}"
        say(f"run {status.run} had ended: {ended}")
        return
    say(f"run {status.run} is stopped; step {status.committed} is committed.")
    say(f"Go on with `resilient run --resume {status.run}`.")
