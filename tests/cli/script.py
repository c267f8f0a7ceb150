"""What the command's tests run: two small ranks, as slow and as broken as the options say."""

import argparse
import time

import torch

import resilient_sdk as rs

parser = argparse.ArgumentParser()
parser.add_argument("--last_step", type=int, default=4)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--fail-at", type=int, default=-1)
options = parser.parse_args()

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}

job = rs.job()
engine = job.initialize(model=lambda: torch.nn.Linear(16, 16), config=CONFIG)
data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
for step in job.steps(data, until=options.last_step):
    with step as (batch,):
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()
        step.report(loss=loss)
        if step.index == options.fail_at and job.rank == 1:
            raise ValueError("a bug of the user's")
        time.sleep(options.seconds)
    if job.rank == 0:
        print(f"rank 0 did step {step.index + 1} of {options.last_step}", flush=True)
print(f"rank {job.rank} is done")
