"""A run, as its owner holds it: launch, attach, status, wait, logs, stop. Nothing here is a parent of the run."""

import json
import os
import pickle
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from resilient_sdk.checkpoint.head import read_head
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import settings_from
from resilient_sdk.coordination.state import Phase, Role, RunState, WorkerState
from resilient_sdk.errors import (
    CannotPickle,
    CheckpointError,
    ConfigError,
    Corrupt,
    NoStandbyLeft,
    RunFailed,
    RunUnreachable,
    is_config_error,
    one_line,
)
from resilient_sdk.ids import RunId, is_run_id, new_run_id
from resilient_sdk.rpc.channels import Client
from resilient_sdk.runtime import rundir
from resilient_sdk.runtime.detached import start_detached
from resilient_sdk.runtime.rundir import RunDirectory
from resilient_sdk.store.address import open_store

_MEMORY_FIX = "Set RESILIENT_MEMORY to a directory in memory that you may write to."
POLL_S = 0.05
ASK_AGAIN_S = 10.0
"""How long a question waits for a controller that is being brought back."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a run now. Facts only: a step is committed when the store's head names it.

    Attributes:
        state: starting | running | recovering | finishing | finished | stopped | failed | no_standby | killed
            (all its processes at once; it can be resumed).
        step: the newest step that every rank has finished; committed: the newest that the head names, or None.
        ranks: the pid that owns each rank, None while a rank has no owner and when the run has ended.
        standbys_ready: warm ones; standbys: one line for each standby that is not.
        lost_steps: finished steps that had to be run again, in all recoveries together.
        skipped_uploads: steps that were not uploaded because the store was behind.
    """

    run: RunId
    state: str
    generation: int
    step: int
    committed: int | None
    step_s: float
    ranks: tuple[int | None, ...]
    standbys_ready: int
    standbys: tuple[str, ...]
    recoveries: int
    lost_steps: int
    skipped_uploads: int
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    error: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen, unless it is resumed."""
        return self.state in ("finished", "stopped", "failed", "no_standby", "killed")


class Run:
    """A handle on a run; holding none, or several, changes nothing for the run itself."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    @property
    def id(self) -> RunId:
        """What `attach` takes."""
        return self._directory.run

    @property
    def directory(self) -> RunDirectory:
        """Where everything of the run is, but for a store and snapshots that live elsewhere."""
        return self._directory

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    @property
    def launched_at(self) -> float:
        """Wall seconds."""
        return (self._directory.path / "run.json").stat().st_mtime

    def glance(self) -> Status:
        """What the controller wrote down last: asks nobody, waits for nobody. A run all of whose processes
        were killed still looks as it did then; see `directory.alive()`.

        Raises:
            NewerFormat: a newer version's run.
        """
        self._directory.settings()
        record = self._directory.read("state.json")
        return _status(self.id, RunState() if record is None else RunState.load(record))

    def status(self) -> Status:
        """What is known now.

        Raises:
            RunUnreachable: the controller does not answer and does not come back.
        """
        s, alive = self._state()
        status = _status(self.id, s)
        if alive:
            return status
        gone = replace(status, ranks=(None,) * len(status.ranks), standbys_ready=0, standbys=())
        if s.phase == Phase.ENDED:
            return gone
        return replace(
            gone, state="killed", message=f"all its processes were killed; {self._what_is_left(s)}"
        )

    def wait(self, timeout_s: float | None = None) -> Status:
        """Blocks until the run has ended and cleaned up; Ctrl-C ends the waiting, not the run.

        Returns the last status of a run that finished or was stopped.

        Raises:
            RunFailed: the user's code failed; `evidence` has rank, step and traceback.
            NoStandbyLeft: it can be resumed.
            RunUnreachable: all its processes were killed at once; it can be resumed.
            TimeoutError: `timeout_s` has passed.
        """
        deadline = None if timeout_s is None else SYSTEM_CLOCK.monotonic() + timeout_s
        while self._directory.alive():
            if deadline is not None and SYSTEM_CLOCK.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} goes on after {timeout_s:g} s")
            SYSTEM_CLOCK.sleep(POLL_S)
        self._finish_what_was_killed()
        status = self.status()
        raise_for(status)
        return status

    def stop(self, *, wait: bool = True) -> None:
        """Ends the run with its state committed, so that it can be resumed."""
        while self._directory.alive():
            try:
                with closing(self._client()) as client:
                    client.stop("stopped by its owner")
            except RunUnreachable:
                SYSTEM_CLOCK.sleep(POLL_S)
                continue
            break
        if wait:
            while self._directory.alive():
                SYSTEM_CLOCK.sleep(POLL_S)

    def logs(self, rank: int) -> str:
        """What every worker that ever owned `rank` has printed, oldest first.

        Raises:
            ConfigError: no such rank.
        """
        self.require_rank(rank)
        history = self._state()[0].history
        return "".join(self._log(worker) for worker in history[rank]) if history else ""

    def require_rank(self, rank: int) -> None:
        """Raises ConfigError if the run has no such rank."""
        nproc = self._directory.settings().nproc
        if not 0 <= rank < nproc:
            raise ConfigError(f"run {self.id} has no rank {rank}", fix=f"Its ranks are 0 to {nproc - 1}.")

    def events(self) -> list[dict[str, Any]]:
        """The journal so far: every durable fact, in order, with its wall `time`."""
        path = self._directory.journal
        if not path.exists():
            return []
        # A line that is still being written has no end yet.
        return [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]

    # ---- inside ----

    def _log(self, worker: int) -> str:
        path = self._directory.worker_log(worker)
        return path.read_text(errors="replace") if path.exists() else ""

    def _client(self) -> Client:
        record = self._directory.read("controller.json")
        if record is None:
            raise RunUnreachable(f"run {self.id} has no controller yet")
        return Client(record["address"], self._directory.token())

    def _state(self) -> tuple[RunState, bool]:
        """What the controller knows, and whether the run lives."""
        deadline = SYSTEM_CLOCK.monotonic() + ASK_AGAIN_S
        while self._directory.alive():
            try:
                with closing(self._client()) as client:
                    answer = client.status()
                if answer:
                    return RunState.load(answer), True
            except RunUnreachable:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise
            SYSTEM_CLOCK.sleep(POLL_S)
        record = self._directory.read("state.json")
        return RunState() if record is None else RunState.load(record), False

    def _what_is_left(self, s: RunState) -> str:
        if Path(self._directory.settings().memory).exists() and s.best > 0:
            return f"step {s.best} or a later one is in memory"
        return "nothing was committed" if s.head < 0 else f"step {s.head} is committed"

    def _finish_what_was_killed(self) -> None:
        """Ended, but the controller was killed before it had cleaned up, or could not commit: one more tries."""
        record = self._directory.read("state.json")
        settings = self._directory.settings()
        if record is None or not Path(settings.memory).exists():
            return
        if RunState.load(record).phase == Phase.ENDED:
            with suppress(RunUnreachable):  # it may be done before it was seen
                start_detached(self._directory, "controller")
            while self._directory.process("controller") is not None:
                SYSTEM_CLOCK.sleep(POLL_S)


def _status(run: RunId, s: RunState) -> Status:
    spare = [w for w in s.workers if w.role in (Role.READY, Role.WARMING, Role.FRESH, Role.ORDERED)]
    return Status(
        run=run,
        state=_state_name(s),
        generation=s.generation,
        step=s.best,
        committed=None if s.head < 0 else s.head,
        step_s=s.step_seconds(),
        ranks=tuple(None if owner is None else s.workers[owner].pid for owner in s.owners),
        standbys_ready=sum(w.role == Role.READY and w.warm for w in spare),
        standbys=tuple(_standby_line(w) for w in spare if not (w.role == Role.READY and w.warm)),
        recoveries=s.recoveries,
        lost_steps=s.lost,
        skipped_uploads=s.missed,
        metrics=dict(s.metrics),
        message=s.message,
        error=dict(s.error),
    )


def _state_name(s: RunState) -> str:
    if s.phase == Phase.ENDED:
        return s.outcome
    if s.phase == Phase.FINISHING:
        return "finishing"
    if s.broken_at:
        return "recovering"
    return "running" if s.phase == Phase.STEPPING else "starting"


def _standby_line(worker: WorkerState) -> str:
    if worker.role == Role.READY:
        return f"worker {worker.worker} is ready but cold: {worker.note}"
    return f"worker {worker.worker} is warming up"


def raise_for(status: Status) -> None:
    """Raises what a failed run's owner has to know; returns for any other."""
    if status.state == "killed":
        raise RunUnreachable(f"run {status.run}: {status.message}",
                             fix=f"Go on with `resilient run --resume {status.run}`.")  # fmt: skip
    if status.state == "failed" and is_config_error(status.error.get("kind")):
        raise RunFailed(f"run {status.run}: {status.error['message']}", **status.error)
    if status.state == "failed":
        raise RunFailed(f"run {status.run}: {status.message}", fix=_after_failure(status), **status.error)
    if status.state == "no_standby":
        raise NoStandbyLeft(f"run {status.run}: {status.message}; step {status.committed} is committed",
                            fix=f"Go on with `resilient run --resume {status.run}`.")  # fmt: skip


def _after_failure(status: Status) -> str:
    rank = status.error.get("rank")
    where = f"`resilient logs {status.run} --rank {rank}` has the whole traceback" if rank is not None else ""
    resume = (
        f"`resilient run --resume {status.run}` goes on at step {status.committed}"
        if status.committed
        else ""
    )
    return "; ".join(part for part in (where, resume) if part) + "." if where or resume else ""


def launch(  # noqa: PLR0913  # keywords, each with a default: what a run can be asked to be
    train: Callable[[Any], Any] | None = None,
    *,
    nproc: int = 1,
    standbys: int = 1,
    run_id: str | None = None,
    store: str | None = None,
    store_budget_bytes: int = 8 << 30,
    seed: int = 0,
    max_restarts: int = 100,
    stall_floor_s: float = 30.0,
    startup_s: float = 600.0,
    script: str | None = None,
    arguments: Sequence[str] = (),
    module: bool = False,
    faults: Sequence[dict[str, Any]] = (),
) -> Run:
    """Starts a run and returns at once; the run lives in sessions of its own.

    Args:
        train: called as `train(job)` in every worker. Travels by cloudpickle, by value if it is a notebook's.
        nproc: ranks. standbys: workers that wait, warmed up, to take a dead rank's place.
        store: where committed states go: a directory; default: in the run's own directory.
        store_budget_bytes: what the run may keep there; above it older steps go first, then uploads are skipped.
        seed: of data order, model initialisation and everything random.
        max_restarts: how many dead workers are replaced by new standbys.
        stall_floor_s: no step counts as hung before this many seconds. startup_s: the same for starting up.
        script, arguments, module: instead of `train`: a script (or module) that asks `rs.job()` for its job.
        faults: a chaos drill; see `resilient_sdk.faults.Fault`.

    Raises:
        ConfigError: what was asked for cannot work. Nothing was started.
    """
    if (train is None) == (script is None):
        raise ConfigError("a run needs a function or a script", fix="Give one of the two.")
    pickled = b"" if train is None else _pickle(train)
    if script is not None and not module and not Path(script).is_file():
        raise ConfigError(f"there is no script {script}", fix="Give the path of a Python file.")
    run = new_run_id() if run_id is None else _checked_id(run_id)
    settings = settings_from(
        run=run, nproc=nproc, standbys=standbys, max_restarts=max_restarts, seed=seed,
        stall_floor_s=stall_floor_s, startup_s=startup_s, store_budget_bytes=store_budget_bytes,
        store=_absolute(store) if store is not None else str(rundir.runs_directory() / run / "store"),
        memory=str(rundir.memory_directory(run)), script=script, module=module, arguments=tuple(arguments),
        cwd=str(Path.cwd()), path=tuple(sys.path), faults=tuple(faults),
    )  # fmt: skip
    if store is not None:
        open_store(settings.store).close()  # an unusable store is told before anything starts
    sweep()
    directory = rundir.create(settings, pickled)
    try:
        _make_room(directory)
    except ConfigError:
        shutil.rmtree(directory.path)  # and not the memory: it is not ours
        raise
    _start(directory)
    return Run(directory)


def _checked_id(text: str) -> RunId:
    if not is_run_id(text):
        raise ConfigError(
            f"run id = {text!r}",
            fix="Use up to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first.",
        )
    return RunId(text)


def resume(run_id: str, *, nproc: int | None = None) -> Run:
    """Goes on with a run that has ended, from its newest step, with what it was launched with.

    `nproc` can only be what it was launched with, so far: a state is that of its number of ranks.

    Raises:
        RunNotFound: no such run. ConfigError: it has not ended, or it finished, or another `nproc`.
        NewerFormat, Corrupt: the store's head cannot be read. StoreUnavailable: the store is gone.
    """
    directory = rundir.find(run_id)
    settings = directory.settings()
    record = directory.read("state.json")
    if nproc not in (None, settings.nproc):
        raise ConfigError(f"run {run_id} has {settings.nproc} ranks, and to go on with {nproc} is not possible yet",
                          fix=f"Resume it with nproc = {settings.nproc}.")  # fmt: skip
    if directory.alive():
        raise ConfigError(f"run {run_id} is running", fix=f"Use `resilient attach {run_id}`.")
    if record is not None and record["outcome"] == "finished":
        raise ConfigError(f"run {run_id} has finished", fix="Start a new run.")
    _check_head(settings.store)
    _make_room(directory)
    (directory.path / "resume").touch(mode=0o600)
    _start(directory)
    return Run(directory)


def _check_head(address: str) -> None:
    with open_store(address) as store:
        try:
            read_head(store)
        except Corrupt as problem:
            raise Corrupt(
                problem.what, fix=f"Bring back {address} from a copy, or start a new run."
            ) from problem


def attach(run_id: str) -> Run:
    """A handle on a run that was started anywhere by this user on this machine.

    Raises:
        RunNotFound: no such run.
    """
    return Run(rundir.find(run_id))


def runs() -> Iterator[Run]:
    """Every run of this user, oldest first."""
    for directory in rundir.all_runs():
        yield Run(directory)


def sweep() -> None:
    """Removes what runs whose processes were all killed have left in shared memory, if their state is not needed."""
    for directory in rundir.all_runs():
        try:
            record = directory.read("state.json")
            ended = record is not None and record["phase"] == Phase.ENDED and not directory.alive()
            if ended and not directory.keeps_memory():
                directory.remove_leftovers()
        except (CheckpointError, KeyError):
            continue  # damaged, or a newer version's: whoever asks for it is told


def _start(directory: RunDirectory) -> None:
    # The agent first: it starts the zygote, which takes longest, and the controller beside it.
    try:
        start_detached(directory, "agent")
    except RunUnreachable:
        if not directory.keeps_memory():
            directory.remove_leftovers()
        raise


def _make_room(directory: RunDirectory) -> None:
    for path in (directory.rendezvous, Path(directory.settings().memory)):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        except OSError as problem:
            raise ConfigError(f"cannot make {path}: {problem.strerror}", fix=_MEMORY_FIX) from problem
        # Shared memory is open to all: who owns the directory could replace what is restored from it.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{path} is not a directory of yours", fix=_MEMORY_FIX)


def _pickle(train: Callable[[Any], Any]) -> bytes:
    if not callable(train):
        raise ConfigError(f"train is {type(train).__name__}", fix="Pass a function that takes the job.")
    try:
        return bytes(cloudpickle.dumps(train))
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as problem:
        name = getattr(train, "__name__", "train")
        raise CannotPickle(
            f"{name} cannot travel to other processes: {one_line(problem)}",
            fix="Make what it uses (files, locks, connections) inside the function.",
        ) from problem


def _absolute(store: str) -> str:
    if "://" in store or not store.strip():
        return store  # an empty one is refused by name, and is not the current directory
    return os.path.abspath(Path(store).expanduser())  # noqa: PTH100  # keeps it a string
