"""One zygote for all tests that need real ranks: DeepSpeed is imported once, and not by pytest itself."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 60.0


class Zygote:
    def __init__(self, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # As the agent starts it: numpy's own threads would be lost in a fork.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        self.log = log
        self.asked = 0
        self.born = self._answer()

    def _answer(self):
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no answer in {LIMIT_S} s:\n{self.log.read_text()[-3000:]}"
        return json.loads(line)

    def run(self, scenario, processes=3, **arguments):
        """Runs a scenario in so many new processes; their answers, all ok except of one that had to die."""
        self.asked += 1
        request = {"id": self.asked, "scenario": scenario, "processes": processes, **arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        while answer["id"] != self.asked:  # of a scenario that a test gave up
            answer = self._answer()
        answers = answer["answers"]
        for answer in answers:
            assert answer["ok"] or "died" in answer, answer.get("error", answer)
        return answers

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "stderr")
    yield zygote
    zygote.close()
