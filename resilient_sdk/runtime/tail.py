"""Reading along: what a run writes while it goes on, from files alone, so that no process has to answer."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resilient_sdk.runtime.rundir import RunDirectory


class FileTail:
    """What was appended to a text file since the last look. The file may not be there yet."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @classmethod
    def at_end(cls, path: Path) -> "FileTail":
        """A tail that begins with what is written from now on."""
        return cls(path, offset=path.stat().st_size if path.exists() else 0)

    def read(self) -> str:
        """New text; a character whose last bytes are not there yet comes with the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)


class JournalTail:
    """The facts of a run's journal, each once."""

    def __init__(self, directory: RunDirectory, *, from_end: bool = False) -> None:
        self._file = FileTail.at_end(directory.journal) if from_end else FileTail(directory.journal)
        self._rest = ""

    def read(self) -> Iterator[dict[str, Any]]:
        """New facts, oldest first; a line that is still being written comes later."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            yield json.loads(line)


class RankTail:
    """What a rank prints, through all workers that own it one after the other."""

    def __init__(self, directory: RunDirectory, rank: int, *, from_end: bool = False) -> None:
        self._directory = directory
        self._rank = rank
        self._tails: dict[int, FileTail] = {}
        if from_end:
            for worker in self._owners():
                self._tails[worker] = FileTail.at_end(directory.worker_log(worker))

    def read(self) -> str:
        """New text of every owner, oldest owner first."""
        for worker in self._owners():
            self._tails.setdefault(worker, FileTail(self._directory.worker_log(worker)))
        return "".join(tail.read() for tail in self._tails.values())

    def _owners(self) -> list[int]:
        record = self._directory.read("state.json")
        history: list[list[int]] = record["history"] if record is not None else []
        return history[self._rank] if self._rank < len(history) else []
