"""What the demo trains, written as a user writes it: nothing here knows that a rank will be killed.

resilient run --nproc-per-node 3 -m resilient_sdk.demo.train OUT STEPS
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param

from resilient_sdk.demo.corpus import ByteText
from resilient_sdk.demo.model import GPT, GPTConfig, build_gpt
from resilient_sdk.training.job import Job, job

SIZES = GPTConfig(layers=6, heads=6, width=192, context=128)
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-3, "warmup_type": "linear"},
    },
}


def train(job: Job, out: Path, steps: int) -> None:
    """Trains for `steps` steps. Each rank writes its losses into `out`, rank 0 the final weights' hash."""
    if torch.cuda.is_available():
        # Equal bits from equal runs: some CUDA kernels add in whatever order their threads come.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251  # cuBLAS reads it
        torch.use_deterministic_algorithms(True)
    engine = job.initialize(model=build, config=DS_CONFIG)
    for step in job.steps(ByteText(SIZES.context), until=steps):
        with step as batch:
            loss = engine(batch.to(job.device))
            engine.backward(loss)
            engine.step()
            step.report(loss=loss)
            # Inside the block: a step that is undone writes its loss again when it runs again.
            _append(losses_file(out, job.rank), {"step": step.index + 1, "loss": loss.item()})
    digest = weights_sha256(engine.module)
    if job.rank == 0:
        _append(weights_file(out), {"sha256": digest})


def build() -> GPT:
    """The model, new, from the run's seed."""
    return build_gpt(SIZES)


def weights_sha256(model: torch.nn.Module) -> str:
    """The hash of all fp32 master weights, gathered from their ranks: every rank has to call it."""
    whole = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = safe_get_full_fp32_param(parameter)
        whole.update(name.encode())
        whole.update(values.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()


def losses_file(out: Path, rank: int) -> Path:
    """Where a rank writes its losses."""
    return out / f"losses-{rank}.jsonl"


def weights_file(out: Path) -> Path:
    """Where rank 0 writes the hash of the weights."""
    return out / "weights.jsonl"


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    train(job(), Path(sys.argv[1]), int(sys.argv[2]))
