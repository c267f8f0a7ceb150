"""A worker: the user's code from its first line to its last, in a process forked from the zygote."""

import os
import runpy
import socket
import sys
import traceback
import types
from pathlib import Path

import cloudpickle

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import RunSettings
from resilient_sdk.coordination.commands import Join, StandBy
from resilient_sdk.errors import ConfigError, one_line
from resilient_sdk.events import StandbyReady, TrainFailed, TrainReturned
from resilient_sdk.faults import Fault, FaultPlan
from resilient_sdk.rpc.frames import Channel
from resilient_sdk.runtime.rundir import RunDirectory
from resilient_sdk.training.job import Job, set_current, why
from resilient_sdk.training.member import EXIT_LEFT, GenerationOver, Member, Unwound, WorkerContext
from resilient_sdk.training.unranked import NeedsRank


def main(number: int, channel: socket.socket, directory: Path) -> int:
    """Runs worker `number`; returns its exit status."""
    run = RunDirectory(directory)
    settings = run.settings()
    context = _context(number, run, settings)
    os.chdir(settings.cwd)
    sys.path[:] = [*settings.path, *(entry for entry in sys.path if entry not in settings.path)]
    member = Member(Channel(channel), context, os._exit)
    try:
        return _live(member, run, settings)
    except Unwound as end:
        print(f"worker {number}: {end.reason}", file=sys.stderr)  # its own log
        return 0 if end.released else 1
    finally:
        member.close()


def _context(number: int, run: RunDirectory, settings: RunSettings) -> WorkerContext:
    plan = FaultPlan(tuple(Fault(**fault.model_dump()) for fault in settings.faults), run.fault_marks)
    return WorkerContext(
        worker=number,
        run=settings.run,
        nproc=settings.nproc,
        seed=settings.seed,
        store=settings.store,
        store_budget_bytes=settings.store_budget_bytes,
        memory=Path(settings.memory),
        rendezvous=run.rendezvous,
        signing_key=run.signing_key(),
        faults=plan,
    )


def _live(member: Member, run: RunDirectory, settings: RunSettings) -> int:
    order = member.await_order(StandBy, Join)
    join = order if isinstance(order, Join) else None
    while True:
        member.context.faults.point("start", rank=join.rank if join is not None else None)
        job = Job(member, join)
        set_current(job)
        try:
            return _attempt(job, member, run, settings)
        except _Cold as cold:
            # Its exception holds the frames of what it ran, and those the engine.
            note = str(cold)
        finally:
            set_current(None)
            job.close()
        member.tell(StandbyReady(member.context.worker, warm=False, note=note))
        join = member.await_join()


class _Cold(Exception):
    """A standby's warm-up came to an end before its first step; the message says where."""


def _attempt(job: Job, member: Member, run: RunDirectory, settings: RunSettings) -> int:
    """The user's code, once. Returns the worker's exit status."""
    try:
        _run_entry(job, run, settings)
    except Unwound:
        raise
    except NeedsRank as unranked:
        raise _Cold(why(unranked)) from None
    except SystemExit as left:
        if not job.has_rank:
            raise _Cold(f"sys.exit({left.code!r})") from None
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except Exception as problem:  # noqa: BLE001  # whatever the user's code raises
        traceback.print_exc()
        if not job.has_rank:
            raise _Cold(why(problem)) from None
        return _failed(job, member, problem)
    if not job.has_rank:
        raise _Cold("the code came to its end without a step")
    if not job.looped:
        return _failed(job, member, ConfigError("the code came to its end without job.steps()",
                                                fix="Loop over job.steps(loader, until=...)."))  # fmt: skip
    member.tell(TrainReturned(member.context.worker))
    return 0


def _failed(job: Job, member: Member, problem: Exception) -> int:
    """Waits for the verdict: was it the user's code, or a peer's death?"""
    text = "".join(traceback.format_exception(problem))
    member.tell(
        TrainFailed(
            member.context.worker,
            job.generation,
            type(problem).__name__,
            one_line(problem),
            text,
            SYSTEM_CLOCK.wall(),
        )
    )
    try:
        member.await_of_generation(job.generation)
    except GenerationOver:
        return EXIT_LEFT
    return 1


def _run_entry(job: Job, run: RunDirectory, settings: RunSettings) -> None:
    if settings.script is None:
        train = cloudpickle.loads(run.entry.read_bytes())  # the owner's, from a 0700 directory
        train(job)
        return
    sys.argv[:] = [settings.script, *settings.arguments]
    if settings.module:
        runpy.run_module(settings.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(settings.script).resolve().parent))
        _run_script(settings.script)


def _run_script(path: str) -> None:
    # runpy.run_path would leave `__main__` without the script's names, and pickles by name would fail.
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, main_module.__dict__)  # noqa: S102  # running the user's script is what this is for
