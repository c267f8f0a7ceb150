"""What the benchmarks train: the same on both sides, ours here and plain DeepSpeed's in plain.py."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from resilient_sdk.demo.model import PRESETS, build_gpt

POLL_S = 0.002


@dataclass(frozen=True)
class Work:
    """One training. `out` collects the ranks' marks; `plain.py` takes the same fields as JSON.

    Attributes:
        model: linears8m (8 Linear of 1024 x 1024) | gpt (the demo's "small", 8.4 M parameters) | tiny.
        samples: a rank's micro-batch. length: tokens of a sample (gpt).
        block: steps between two gates, 0 for none: who comes to a gate waits until the benchmark opens it.
        slow_s: seconds that each put of the store takes, like a store far away.
        checkpoint: plain side only: where it saves after each step; "" for nowhere.
    """

    out: str
    model: str = "linears8m"
    stage: int = 1
    samples: int = 4
    length: int = 0
    steps: int = 1_000_000
    block: int = 0
    slow_s: float = 0.0
    checkpoint: str = ""

    def __call__(self, job: Any) -> None:
        _train(job, self)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.samples,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "gpt":
            return build_gpt(PRESETS["small"])
        return Linears(1024) if self.model == "linears8m" else Linears(32)

    def data(self) -> Dataset[Any]:
        noise = torch.Generator().manual_seed(7)
        if self.model == "gpt":
            return TensorDataset(torch.randint(0, 256, (4096, self.length + 1), generator=noise))
        return TensorDataset(torch.randn(512, 1024 if self.model == "linears8m" else 32, generator=noise))


class Linears(nn.Module):
    """Eight square layers; returns the loss of (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch.bfloat16()).float().pow(2).mean()
        return loss


class Marks:
    """What a rank did when: lines of `what step at cpu`."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._file = -1

    def note(self, what: str, rank: int, step: int) -> None:
        if self._file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(f"{self._out}/marks-{rank}", flags, 0o600)
        line = f"{what} {step} {time.monotonic():.6f} {time.process_time():.6f}\n"
        os.write(self._file, line.encode())


@dataclass(frozen=True)
class Mark:
    """`at`: monotonic seconds, which one machine's processes share; `cpu`: the process's own so far."""

    what: str
    step: int
    at: float
    cpu: float


def marks(out: Path | str, rank: int) -> list[Mark]:
    """A rank's marks so far, oldest first."""
    path = Path(out) / f"marks-{rank}"
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [Mark(what, int(step), float(at), float(cpu)) for what, step, at, cpu in lines]


def gate(work: Work, index: int) -> None:
    """Before step `index`: where a block begins, waits until the benchmark has opened it."""
    if work.block and index % work.block == 0:
        while not (Path(work.out) / f"gate-{index // work.block}").exists():
            time.sleep(POLL_S)


def batches(work: Work, rank: int, world: int) -> Iterator[Any]:
    """The plain side's data, as one writes it with torch alone."""
    from torch.utils.data import DataLoader, DistributedSampler

    data = work.data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=work.samples, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def _train(job: Any, work: Work) -> None:
    _slow_down(work.slow_s)
    log = Marks(work.out)
    engine = job.initialize(model=work.build, config=work.config())
    for step in job.steps(work.data(), until=work.steps):
        with step as (batch,):
            # A standby's rehearsal ends here if it asks for its rank; it must run a whole step.
            rank = None if job.is_standby else job.rank
            if rank is not None:
                log.note("begin", rank, step.index + 1)
                gate(work, step.index)
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            if rank is not None:
                log.note("step", rank, step.index + 1)
        if rank is not None:
            log.note("left", rank, step.index + 1)


def _slow_down(seconds: float) -> None:
    if not seconds:
        return
    from resilient_sdk.store.files import FileStore

    fast = FileStore.put

    def put(self: FileStore, key: str, value: Any) -> None:
        time.sleep(seconds)
        fast(self, key, value)

    FileStore.put = put  # type: ignore[method-assign]  # in this worker only
