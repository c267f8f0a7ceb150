"""Bad input: one line on stderr that says what to do, an exit status, nothing started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from resilient_sdk.cli import app
from resilient_sdk.runtime.run import runs
from tests.cli.conftest import SCRIPT


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("run", "--nproc-per-node", "0", SCRIPT), 2, "nproc = 0"),
        (("run", "--nproc-per-node", "many", SCRIPT), 2, "nproc = 'many'"),
        (("run", "--standbys", "-1", SCRIPT), 2, "standbys = -1"),
        (("run", "--store-budget", "8 Quarts", SCRIPT), 2, "'8 Quarts' is not a size"),
        (("run", "--store", "redis://here", SCRIPT), 2, "no store for 'redis://here'"),
        (("run", "--store", "/proc/nothing/store", SCRIPT), 6, "cannot use /proc/nothing/store"),
        (("run", "--nnodes", "2", SCRIPT), 2, "one machine"),
        (("run", "--run-id", "../elsewhere", SCRIPT), 2, "../elsewhere"),
        (("run", "missing.py"), 2, "there is no script missing.py"),
        (("run",), 2, "there is no script"),
        (("run", "--resume", "run-00000000"), 3, "there is no run 'run-00000000'"),
        (("status", "run-00000000"), 3, "there is no run 'run-00000000'"),
        (("logs", "../../etc"), 3, "there is no run"),
        (("attach", "run-00000000"), 3, "there is no run"),
        (("stop", "run-00000000"), 3, "there is no run"),
        (("demo", "--steps", "2"), 2, "steps = 2"),
        (("demo", "--nproc", "0"), 2, "nproc = 0"),
        (("demo", "--json", "/proc/nothing/report.json"), 2, "cannot write /proc/nothing/report.json"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments: tuple[str, ...], status: int, says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == status
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("resilient: ")
    assert says in result.stderr
    assert list(runs()) == []


def test_a_home_that_cannot_be_written_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_HOME", "/proc/nothing")
    result = invoke("run", SCRIPT)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "RESILIENT_HOME" in result.stderr
    assert home


def test_debug_shows_where() -> None:
    result = invoke("--debug", "status", "run-00000000")
    assert type(result.exception).__name__ == "RunNotFound"


@pytest.mark.usefixtures("home")
def test_no_runs_is_not_an_error() -> None:
    result = invoke("ps")
    assert (result.exit_code, result.stdout) == (0, "")
