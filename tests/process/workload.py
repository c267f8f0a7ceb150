"""The training that the scenarios disturb: small, but with everything that can go wrong in its state.

Dropout (RNG), a running mean (buffers), an LR scheduler, clipping, gradient accumulation, bf16 with fp32 masters,
augmentation in the data set (RNG of the data). Each rank writes its losses; at the end, a hash of all weights.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from resilient_sdk.faults import Fault, FaultPlan

WIDTH = 32


@dataclass(frozen=True)
class Workload:
    """What to train and where to strike inside the user's own code. `out` collects what the ranks write.

    At each of its `gates`, a step's number, it waits until the file `out/open-<number>` exists: so that a test
    can do what it has to do at a known step, however busy the machine is.
    """

    out: Path
    stage: int = 2
    accumulation: int = 2
    steps: int = 12
    faults: tuple[Fault, ...] = ()
    bf16: bool = True
    num_workers: int = 0
    pause_s: float = 0.0
    gates: tuple[int, ...] = ()

    def __call__(self, job: Any) -> None:
        train(job, self)


class Noisy(Dataset[torch.Tensor]):
    """64 fixed samples, each with fresh noise from the global generator whenever it is fetched."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._samples = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))
        self.where: Any = lambda: (None, 0)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        rank, step = self.where()
        self._plan.point("data", rank=rank, step=step)
        return self._samples[index] + 0.1 * torch.randn(WIDTH)


class RunningMean(nn.Module):
    """Subtracts a running mean: a buffer that every forward changes, as a batch norm's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return hidden - self.mean.to(hidden.dtype)


class Net(nn.Module):
    def __init__(self, *, bf16: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = RunningMean(2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.strike: Any = lambda point: None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(batch.to(self.dtype))).relu())
        self.strike("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.strike("backward"))
        return (self.last(hidden).float() - batch).pow(2).mean()


class StruckAdamW(torch.optim.AdamW):
    """Strikes after the update, before DeepSpeed gathers the weights: the worst moment inside engine.step."""

    strike: Any = staticmethod(lambda point: None)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        done = super().step(closure)
        type(self).strike("step")
        return done


def ds_config(work: Workload) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": work.stage},
        "bf16": {"enabled": work.bf16},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.01}},
    }


def train(job: Any, work: Workload) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    plan = FaultPlan(work.faults, work.out)
    data = Noisy(plan)
    place = {"rank": None, "step": 0}
    data.where = lambda: (place["rank"], place["step"])

    def strike(point: str) -> None:
        plan.point(point, rank=place["rank"], step=place["step"] or 0)

    def build() -> Net:
        net = Net(bf16=work.bf16)
        net.strike = strike
        return net

    StruckAdamW.strike = staticmethod(strike)
    engine = job.initialize(
        model=build, config=ds_config(work), optimizer=lambda params: StruckAdamW(params, lr=0.01)
    )
    loader: Any = data
    if work.num_workers:
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=work.num_workers)
    for step in job.steps(loader, until=work.steps):
        place["step"] = step.index + 1
        with step as batch:
            place["rank"] = None if job.is_standby else job.rank
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            step.report(loss=loss)
            time.sleep(work.pause_s)
            while step.index in work.gates and not (work.out / f"open-{step.index}").exists():
                time.sleep(0.02)
            _write(
                work.out / f"loss-{job.rank}", {"step": step.index, "micro": step.micro, "loss": loss.item()}
            )
    whole = hashlib.sha256()
    for parameter in engine.module.parameters():
        master = safe_get_full_fp32_param(parameter)
        whole.update(
            (parameter if master is None else master).detach().float().contiguous().numpy().tobytes()
        )
    for name, buffer in engine.module.named_buffers():
        if job.rank == 0:
            whole.update(name.encode() + buffer.float().numpy().tobytes())
    _write(work.out / f"weights-{job.rank}", {"hash": whole.hexdigest()})


def _write(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class Result:
    """What a run computed: every loss of every rank, and the weights' hash as each rank saw it."""

    losses: dict[tuple[int, int, int], float]
    weights: dict[int, str]


def read_result(out: Path, nproc: int) -> Result:
    """Reads what the ranks wrote. A step that ran twice must have had the same loss both times."""
    losses: dict[tuple[int, int, int], float] = {}
    weights = {}
    for rank in range(nproc):
        for line in (out / f"loss-{rank}").read_text().splitlines():
            record = json.loads(line)
            place = (rank, record["step"], record["micro"])
            assert losses.setdefault(place, record["loss"]) == record["loss"], (
                f"{place} was served other data"
            )
        weights[rank] = json.loads((out / f"weights-{rank}").read_text().splitlines()[-1])["hash"]
    return Result(losses, weights)
