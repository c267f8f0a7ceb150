"""The demo: a run without a fault, the same run with a rank killed, and whether anything differs.

The numbers are read from the two runs' journals and from what their ranks wrote; see `measure`.
"""

import json
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import hide_gpus
from resilient_sdk.demo.measure import Losses, Recovery, read_losses, recovery, restoring
from resilient_sdk.errors import ConfigError, RunError
from resilient_sdk.runtime.devices import gpu_count
from resilient_sdk.runtime.run import Run, Status, launch
from resilient_sdk.runtime.tail import JournalTail

POLL_S = 0.02
RANKS = 3
STEPS = 40
MIN_STEPS = 8
STANDBYS = 1
TELL_EVERY = 10

Say = Callable[[str, str], None]
"""Tells a line, in a style: title | step | phase | kill | note."""


@dataclass(frozen=True)
class Trained:
    """What one of the two runs came to. `losses` is None where they contradict each other."""

    losses: Losses | None
    weights: str
    step_s: float
    seconds: float
    recovery: Recovery | None
    lost_steps: int


@dataclass(frozen=True)
class Report:
    """Both runs, side by side."""

    nproc: int
    steps: int
    device: str
    baseline: Trained
    faulted: Trained

    @property
    def identical_losses(self) -> bool:
        return self.baseline.losses is not None and self.baseline.losses == self.faulted.losses

    @property
    def identical_weights(self) -> bool:
        return bool(self.baseline.weights) and self.baseline.weights == self.faulted.weights

    @property
    def identical(self) -> bool:
        return self.identical_losses and self.identical_weights

    def record(self) -> dict[str, Any]:
        """The report as JSON. Seconds throughout; losses by rank, from step 1 on."""
        found = self.faulted.recovery
        return {
            "identical_losses": self.identical_losses,
            "identical_weights": self.identical_weights,
            "steps_lost": self.faulted.lost_steps,
            "recovery_s": found.seconds if found else None,
            "phases_s": found.phases if found else {},
            "phases_inside_s": found.inside if found else {},
            "step_s": self.faulted.step_s,
            "seconds": self.faulted.seconds,
            "losses": self.faulted.losses,
            "weights_sha256": self.faulted.weights,
            "baseline": {
                "step_s": self.baseline.step_s,
                "seconds": self.baseline.seconds,
                "losses": self.baseline.losses,
                "weights_sha256": self.baseline.weights,
            },
            "nproc": self.nproc,
            "standbys": STANDBYS,
            "steps": self.steps,
            "device": self.device,
            "machine": {
                "cpus": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
            },
        }


def tell(say: Say, *, nproc: int | None = None, steps: int = STEPS) -> Report:
    """Runs the demo; `nproc` None: 3 ranks, or as many as there are GPUs if those are fewer.

    Raises:
        ConfigError: too few steps or ranks. RunError: a run did not come to its end.
    """
    if steps < MIN_STEPS:
        raise ConfigError(
            f"steps = {steps}", fix=f"Give at least {MIN_STEPS}: a rank is killed between them."
        )
    ranks, device = choose_device(nproc)
    say(f"A small GPT learns bytes: {ranks} ranks and a warm standby on {device}, ZeRO-2, bf16.", "title")
    say(f"First without a fault: {steps} steps.", "title")
    baseline = _train(say, ranks, steps, None)
    say(f"Once more, and rank {ranks // 2} is killed on the way.", "title")
    faulted = _train(say, ranks, steps, ranks // 2)
    return Report(ranks, steps, device, baseline, faulted)


def choose_device(nproc: int | None) -> tuple[int, str]:
    """(ranks, device): GPUs where every rank can have its own, else CPUs."""
    gpus = gpu_count()
    ranks = nproc if nproc is not None else min(RANKS, gpus or RANKS)
    if gpus >= ranks > 0:
        return ranks, "GPUs (nccl)"
    if gpus:
        hide_gpus()
        return ranks, f"CPUs (gloo; {gpus} of the {ranks} GPUs it would take are here)"
    return ranks, "CPUs (gloo)"


def _train(say: Say, nproc: int, steps: int, victim: int | None) -> Trained:
    began = SYSTEM_CLOCK.monotonic()
    with _scratch() as out:
        # As a script, so that this process needs no torch.
        run = launch(
            script="resilient_sdk.demo.train", module=True, arguments=(str(out), str(steps)),
            nproc=nproc, standbys=STANDBYS,
        )  # fmt: skip
        try:
            watch = _Watch(say, run, steps, victim)
            watch.to_the_end()
            status = run.wait()
            if status.state != "finished":
                raise RunError(f"run {run.id} is {status.state}", fix=f"See {run.directory.path}.")
            trained = Trained(
                _losses(out, nproc), _weights(out), status.step_s, SYSTEM_CLOCK.monotonic() - began,
                watch.recovery(), status.lost_steps,
            )  # fmt: skip
        finally:
            run.stop()
    run.directory.remove()
    return trained


class _Watch:
    """Follows a run, tells what happens, and kills its victim."""

    def __init__(self, say: Say, run: Run, steps: int, victim: int | None) -> None:
        self._say = say
        self._run = run
        self._steps = steps
        self._victim = victim
        self._journal = JournalTail(run.directory)
        self._facts: list[dict[str, Any]] = []
        self._killed_at: float | None = None
        self._told = 0
        self._recovered = False

    def to_the_end(self) -> None:
        while self._run.directory.alive():
            self._look()
            SYSTEM_CLOCK.sleep(POLL_S)
        self._look()

    def recovery(self) -> Recovery | None:
        return None if self._killed_at is None else recovery(self._facts, self._killed_at)

    def _look(self) -> None:
        for fact in self._journal.read():
            self._facts.append(fact)
            self._tell(fact)
        status = self._run.glance()
        if status.step >= self._told + TELL_EVERY:
            self._told = status.step - status.step % TELL_EVERY
            self._say(
                f"step {status.step} of {self._steps}, loss {status.metrics.get('loss', 0.0):.3f}", "step"
            )
        if self._victim is not None and self._killed_at is None and self._due(status):
            self._kill(status, self._victim)

    def _due(self, status: Status) -> bool:
        # A third on its way and the standby warm; at the latest while there are steps left to see it go on.
        late = status.step >= self._steps - 4
        return status.state == "running" and (
            late or (status.step >= self._steps // 3 and status.standbys_ready > 0)
        )

    def _kill(self, status: Status, rank: int) -> None:
        pid = status.ranks[rank]
        if pid is None:
            return
        self._killed_at = SYSTEM_CLOCK.wall()
        os.kill(pid, signal.SIGKILL)
        self._say(f"SIGKILL to rank {rank} (pid {pid}) after step {status.step}", "kill")

    def _tell(self, fact: Mapping[str, Any]) -> None:
        if self._killed_at is None:
            if fact["fact"] == "StandbyReady" and fact["warm"]:
                self._say("the standby is warm", "note")
            return
        for line in [] if self._recovered else _phase_lines(fact):
            self._say(
                f"{1000 * (fact['time'] - line.earlier - self._killed_at):6.0f} ms  {line.text}", "phase"
            )
        self._tell_commit(fact)

    def _tell_commit(self, fact: Mapping[str, Any]) -> None:
        found = self.recovery()
        if found is not None and not self._recovered:
            self._recovered = True
            self._say(
                f"{1000 * found.seconds:6.0f} ms  committed: the head names step {fact['step']}", "phase"
            )


@dataclass(frozen=True)
class _Line:
    text: str
    earlier: float = 0.0  # seconds before its fact was journaled


def _phase_lines(fact: Mapping[str, Any]) -> Iterator[_Line]:
    name = fact["fact"]
    if name == "RankLost":
        yield _Line(f"detected: rank {fact['rank']} {fact['cause']}")
    elif name == "StandbyPromoted":
        yield _Line(
            f"promoted: worker {fact['worker']} takes rank {fact['rank']}"
            + ("" if fact["warm"] else ", cold")
        )
    elif name == "GenerationFormed":
        inside = fact["phases"]
        parts = ", ".join(
            f"{n} {1000 * inside[n]:.0f} ms" for n in ("leave", "form", "rebuild") if n in inside
        )
        loading = restoring(fact)
        yield _Line(
            f"re-formed: {len(fact['workers'])} ranks, generation {fact['generation']} ({parts})", loading
        )
        yield _Line(f"restored: every rank stands at step {fact['step']} ({1000 * loading:.0f} ms)")
    elif name == "RecoveryFinished":
        yield _Line(f"stepping: every rank has done step {fact['step']}")


def _losses(out: Path, nproc: int) -> Losses | None:
    losses: Losses = {}
    for rank in range(nproc):
        of_rank = read_losses((out / f"losses-{rank}.jsonl").read_text())
        if of_rank is None:
            return None
        losses[rank] = of_rank
    return losses


def _weights(out: Path) -> str:
    return str(json.loads((out / "weights.jsonl").read_text().splitlines()[-1])["sha256"])


@contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="resilient-demo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
