"""The command as a user has it: a process of its own, in a directory of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_sdk.runtime.run import runs

COMMAND = (sys.executable, "-c", "from resilient_sdk.cli import main; main()")
SCRIPT = str(Path(__file__).with_name("script.py"))
LIMIT_S = 90.0


class Cli:
    """Runs `resilient` and keeps what it said."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command to its end."""
        return subprocess.run(
            [*COMMAND, *arguments], cwd=self._cwd, env=self._environment(),
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts the command; its stdout and stderr come as one stream."""
        started = subprocess.Popen(
            [*COMMAND, *arguments], cwd=self._cwd, env=self._environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._started.append(started)
        return started

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "100"}

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for run in runs():
            run.stop()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What the process says up to the first line that matches; fails if none comes."""
    assert process.stdout is not None
    said = ""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        said += line
        if re.search(pattern, line):
            return said
        if not line:
            break
    raise AssertionError(f"no {pattern!r} in:\n{said}")


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ctrl-C; returns the exit status and what was said after it."""
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, rest


@pytest.fixture
def cli(home: Path, tmp_path: Path) -> Iterator[Cli]:
    """The command. Every run that a test leaves running is stopped before `home` looks what is left."""
    assert home
    command = Cli(tmp_path)
    yield command
    command.close()
