"""The run directory: where the processes of a run and its owner find each other. 0700; its files 0600.

run.json          settings, written once        token             the run's secret
entry.pkl         the function, if it is one    state.json        the controller's memory
controller.json   pid, address                  agent.json        pid
events.jsonl      the journal of facts          logs/             a file a process
rendezvous/       a file a generation           faults/           marks of a chaos drill
store/            the embedded store, unless settings name another
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from resilient_sdk.config import FORMAT, RunSettings, home, memory_root
from resilient_sdk.errors import ConfigError, Corrupt, NewerFormat, RunNotFound
from resilient_sdk.ids import RunId, is_run_id
from resilient_sdk.runtime.processes import ProcessId

NAMED = 5
"""How many runs a message names: it is to stay one line."""


class RunDirectory:
    """One run's directory. Reading never creates anything."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run(self) -> RunId:
        return RunId(self.path.name)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def fault_marks(self) -> Path:
        return self.path / "faults"

    @property
    def journal(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def entry(self) -> Path:
        return self.path / "entry.pkl"

    def worker_log(self, worker: int) -> Path:
        return self.logs / f"worker-{worker}.log"

    # ---- what is in it ----

    def settings(self) -> RunSettings:
        """The run's settings.

        Raises:
            NewerFormat: written by a newer version.
            RunNotFound: the directory is not a run's.
        """
        record = self.read("run.json")
        if record is None:
            raise RunNotFound(f"{self.path} holds no run", fix="List runs with `resilient ps`.")
        if record.get("format", 0) > FORMAT:
            raise NewerFormat(
                f"run {self.run} has format {record['format']}, this version reads {FORMAT}",
                fix="Upgrade resilient_sdk.",
            )
        return RunSettings(**record)

    def token(self) -> str:
        return (self.path / "token").read_text()

    def signing_key(self) -> bytes:
        """What signs the run's manifests: who cannot read the run directory cannot make one."""
        return bytes.fromhex(self.token())

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Replaces a JSON file whole: a reader sees the old one or the new one."""
        write_private(self.path / name, json.dumps(record).encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file, or None if it is not there."""
        try:
            text = (self.path / name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            record: dict[str, Any] = json.loads(text)
        except ValueError as problem:
            raise Corrupt(
                f"{self.path / name} cannot be read: {problem}",
                fix=f"Remove {self.path} if the run is not needed.",
            ) from problem
        return record

    # ---- its processes ----

    def process(self, name: str) -> ProcessId | None:
        """The living controller or agent, or None."""
        record = self.read(f"{name}.json")
        if record is None:
            return None
        found = ProcessId(record["pid"], record["started"])
        return found if found.alive() else None

    def note_process(self, name: str, **more: str) -> None:
        """Writes down the calling process as the run's controller or agent."""
        own = ProcessId.current()
        self.write(f"{name}.json", {"pid": own.pid, "started": own.started, **more})

    def alive(self) -> bool:
        return self.process("controller") is not None or self.process("agent") is not None

    def keeps_memory(self) -> bool:
        """Whether shared memory has what the store has not: the run ended without a commit, or was killed."""
        record = self.read("state.json")
        if record is None or record["outcome"] in ("", "finished"):
            return record is not None and record["outcome"] == ""
        return bool(record["best"] > max(record["head"], 0))

    def remove_leftovers(self) -> None:
        """Removes what only a living run needs: shared memory and rendezvous files."""
        record = self.read("run.json")
        if record is not None:
            shutil.rmtree(record["memory"], ignore_errors=True)
        shutil.rmtree(self.rendezvous, ignore_errors=True)

    def remove(self) -> None:
        """Removes an ended run with all that it kept, but for a store elsewhere."""
        self.remove_leftovers()
        shutil.rmtree(self.path)


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file whole, readable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        # A full disk stays full if each try leaves its half behind.
        temporary.unlink(missing_ok=True)
        raise


def open_private(path: Path) -> BinaryIO:
    """Opens a file for appending, readable by its owner alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def runs_directory() -> Path:
    return home() / "runs"


def memory_directory(run: RunId) -> Path:
    """Where the run's snapshots live. In its name, the user: /dev/shm is shared by all."""
    return memory_root() / f"resilient-{os.getuid()}-{run}"


def create(settings: RunSettings, entry: bytes) -> RunDirectory:
    """Makes the directory of a new run; `entry` is its pickled function, or empty.

    Raises:
        ConfigError: it cannot be made, or the id is taken.
    """
    path = runs_directory() / settings.run
    try:
        runs_directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        for name in ("logs", "faults"):
            (path / name).mkdir(mode=0o700)
        directory = RunDirectory(path)
        write_private(path / "token", secrets.token_hex(32).encode())
        write_private(directory.entry, entry)
        directory.write("run.json", settings.model_dump())
    except FileExistsError as problem:
        raise ConfigError(
            f"run {settings.run} exists",
            fix=f"Choose another id, or go on with `resilient run --resume {settings.run}`.",
        ) from problem
    except OSError as problem:
        shutil.rmtree(path, ignore_errors=True)
        raise ConfigError(
            f"cannot make the run directory {path}: {problem.strerror}",
            fix="Set RESILIENT_HOME to a directory you may write to.",
        ) from problem
    return directory


def find(run: str) -> RunDirectory:
    """The directory of a run.

    Raises:
        RunNotFound: no such run, or not an id at all.
    """
    path = runs_directory() / run
    if not is_run_id(run) or not (path / "run.json").exists():
        known = ", ".join(d.run for d in list(all_runs())[-NAMED:]) or "none"
        raise RunNotFound(f"there is no run {run!r} in {runs_directory()}", fix=f"The newest runs: {known}.")
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise RunNotFound(f"run {run} belongs to user {owner}", fix="A run can be reached by its owner only.")
    return RunDirectory(path)


def all_runs() -> Iterator[RunDirectory]:
    """Every run of this user, oldest first."""
    root = runs_directory()
    if not root.is_dir():
        return
    found = [path for path in root.iterdir() if (path / "run.json").exists()]
    for path in sorted(found, key=lambda p: (p / "run.json").stat().st_mtime):
        yield RunDirectory(path)
