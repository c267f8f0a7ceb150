"""The directory in which the processes of a run and its owner find each other."""

import json
import os
import stat
from pathlib import Path

import pytest

from resilient_sdk.config import RunSettings
from resilient_sdk.errors import ConfigError, Corrupt, NewerFormat, RunNotFound
from resilient_sdk.ids import RunId
from resilient_sdk.runtime import rundir
from resilient_sdk.runtime.run import sweep
from resilient_sdk.runtime.rundir import RunDirectory, write_private

pytestmark = pytest.mark.usefixtures("home")


def make(name: str = "run-1") -> RunDirectory:
    memory = rundir.memory_directory(RunId(name))
    settings = RunSettings(run=name, nproc=2, store="/nowhere", memory=str(memory), cwd="/")
    return rundir.create(settings, b"entry")


def test_what_was_made_is_found_as_it_was_made() -> None:
    made = make()
    found = rundir.find("run-1")
    assert found.path == made.path
    assert found.settings() == made.settings()
    assert found.entry.read_bytes() == b"entry"
    assert len(found.signing_key()) == 32
    assert not found.alive()
    assert found.read("state.json") is None


def test_each_run_has_a_token_of_its_own() -> None:
    assert make("run-1").token() != make("run-2").token()


def test_an_id_is_taken_once() -> None:
    make()
    with pytest.raises(ConfigError, match=r"run run-1 exists\. Choose another id, or go on with"):
        make()
    assert rundir.find("run-1").entry.exists()


def test_runs_are_listed_oldest_first_and_nothing_else(home: Path) -> None:
    assert list(rundir.all_runs()) == []
    for age, name in enumerate(("b", "a", "c")):
        os.utime(make(name).path / "run.json", (1000 + age, 1000 + age))
    (home / "runs" / "not-a-run").mkdir()
    (home / "runs" / "file").touch()
    assert [directory.run for directory in rundir.all_runs()] == ["b", "a", "c"]


def test_a_missing_run_names_the_newest_few() -> None:
    for number in range(8):
        os.utime(make(f"run-{number}").path / "run.json", (1000 + number, 1000 + number))
    with pytest.raises(RunNotFound, match=r"The newest runs: run-3, run-4, run-5, run-6, run-7\.$"):
        rundir.find("run-9")


def test_a_newer_versions_run_is_refused_by_name() -> None:
    made = make()
    record = made.read("run.json")
    assert record is not None
    made.write("run.json", {**record, "format": 2, "something": "new"})
    with pytest.raises(NewerFormat, match=r"run run-1 has format 2, this version reads 1\. Upgrade"):
        made.settings()


@pytest.mark.parametrize("text", ["", "{", '{"phase": "ended"', "\0"])
def test_a_damaged_file_is_said_and_stops_nobody_else(text: str) -> None:
    made = make()
    (made.path / "state.json").write_text(text)
    with pytest.raises(Corrupt, match=r"state\.json cannot be read: ") as problem:
        made.read("state.json")
    assert "\n" not in str(problem.value)
    sweep()
    make("run-2")


def test_a_file_is_replaced_whole_and_privately(tmp_path: Path) -> None:
    path = tmp_path / "file"
    old = os.umask(0)
    try:
        write_private(path, b"1")
        with path.open("rb") as reader:
            write_private(path, b"22")
            assert reader.read() == b"1"
    finally:
        os.umask(old)
    assert path.read_bytes() == b"22"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.glob(".*")) == []


def test_a_process_that_is_no_more_is_not_the_runs() -> None:
    made = make()
    made.note_process("agent", address="here")
    assert made.alive()
    record = made.read("agent.json")
    assert record is not None
    assert (record["pid"], record["address"]) == (os.getpid(), "here")
    made.write("agent.json", {**record, "started": record["started"] - 1})  # the number was given again
    assert not made.alive()


@pytest.mark.parametrize(
    ("outcome", "best", "head", "kept"),
    [
        ("", 0, -1, True),  # killed: the newest steps may not have been noted
        ("", 5, 5, True),
        ("finished", 5, 3, False),
        ("stopped", 5, 5, False),
        ("stopped", 5, 3, True),  # the store was full
        ("no_standby", 5, -1, True),
        ("failed", 0, -1, False),
    ],
)
def test_memory_is_kept_while_the_store_has_less(outcome: str, best: int, head: int, *, kept: bool) -> None:
    made = make()
    assert not made.keeps_memory()
    memory = rundir.memory_directory(RunId("run-1"))
    memory.mkdir()
    phase = "ended" if outcome else "stepping"
    (made.path / "state.json").write_text(
        json.dumps({"phase": phase, "outcome": outcome, "best": best, "head": head})
    )
    assert made.keeps_memory() == kept
    sweep()
    assert memory.exists() == kept
    made.remove()
    assert not memory.exists()
    assert not made.path.exists()
