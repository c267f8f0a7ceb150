"""The other side: the same training as a plain DeepSpeed loop under torchrun, with nothing of the SDK's.

python -m torch.distributed.run --nproc-per-node N plain.py '{"out": ..., "checkpoint": ...}'
"""

import json
import os
import shutil
import sys
from itertools import islice
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import deepspeed.ops
import torch

from tests.benchmarks.work import Marks, Work, batches, gate


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # As on our side: DeepSpeed's own shared-memory collective spins for ever when a peer dies.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    (Path(work.out) / f"pid-{rank}").write_text(str(os.getpid()))
    log = Marks(work.out)
    log.note("start", rank, 0)
    deepspeed.init_distributed("gloo")
    model = work.build()
    engine, *_ = deepspeed.initialize(model=model, config=work.config(), model_parameters=model.parameters())
    log.note("built", rank, 0)
    if work.checkpoint and (Path(work.checkpoint) / "latest").exists():
        engine.load_checkpoint(work.checkpoint)
        log.note("loaded", rank, engine.global_steps)
    _loop(work, engine, log, rank, world)


def _loop(work: Work, engine: "deepspeed.DeepSpeedEngine", log: Marks, rank: int, world: int) -> None:
    for (batch,) in islice(batches(work, rank, world), work.steps - engine.global_steps):
        log.note("begin", rank, engine.global_steps + 1)
        gate(work, engine.global_steps)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        log.note("step", rank, step)
        if work.checkpoint:
            engine.save_checkpoint(work.checkpoint, tag=f"step{step}")
            log.note("saved", rank, step)
            if rank == 0:
                shutil.rmtree(Path(work.checkpoint) / f"step{step - 2}", ignore_errors=True)
        if (Path(work.out) / f"stop-{step}").exists():
            break


if __name__ == "__main__":
    main()
