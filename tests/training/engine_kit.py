"""A model, a config, steps and digests: what the scenarios of test_engine and test_group are made of."""

import hashlib
import pickle

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from resilient_sdk.training import engine as door
from resilient_sdk.training.group import Group, solo_store

deepspeed = door._deepspeed()
WORLD = 3


class Net(nn.Module):
    """Small, with all that can go wrong: dropout, a frozen layer, buffers that change."""

    def __init__(self, width=24, layers=1):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.drop = nn.Dropout(0.3)
        self.middle = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        x = self.frozen(self.middle(self.drop(self.first(x).relu())))
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(x.detach().float().mean(0))
        return self.last(self.norm(x)).float().pow(2).mean()


def make_model(args):
    def factory():
        torch.manual_seed(7)
        if args.get("zero_init"):
            with deepspeed.zero.Init(config_dict_or_path={**config_of(args), "train_batch_size": None}):
                return Net(args.get("width", 24), args.get("layers", 1))
        return Net(args.get("width", 24), args.get("layers", 1))

    return factory


def config_of(args):
    config = {
        "train_batch_size": 2 * args.get("gas", 1) * WORLD,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args["stage"], "stage3_param_persistence_threshold": 100},
        **args.get("config", {}),
    }
    if args.get("fp16"):
        # DeepSpeed refuses fp16 on CPU; torch computes it all the same, and the loss scale is worth a test.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "loss_scale_window": 1, "initial_scale_power": 17, "hysteresis": 1}
    elif args.get("bf16", True):
        config["bf16"] = {"enabled": True}
    if args.get("client") is None:
        kind = args.get("optimizer", "AdamW")
        adam = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
        config["optimizer"] = {
            "type": kind,
            "params": adam if kind.startswith("Adam") else {"lr": 1e-2, **args.get("params", {})},
        }
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}}
    return config


def spec_of(args):
    more = {}
    if args.get("client"):
        more["optimizer"] = lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True)
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        more["model_parameters"] = lambda model: [
            {
                "params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1],
                "weight_decay": 0.1,
            },
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "lr": 3e-3},
        ]
    return door.EngineSpec.from_arguments(model=make_model(args), config=config_of(args), **more)


def step(engine, number, rank, gas, dtype):
    torch.manual_seed(1000 * number + rank)
    losses = []
    for micro in range(gas):
        generator = torch.Generator().manual_seed(number * 100 + micro * 10 + rank)
        loss = engine(torch.randn(2, 8, generator=generator).to(dtype))
        engine.backward(loss)
        assert door.at_boundary(engine) == (micro == gas - 1)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def copy_of(engine):
    state = door.state_of(engine)
    return {k: v.clone() for k, v in state.tensors.items()}, pickle.loads(pickle.dumps(state.scalars))


def as_bytes(tensors):
    return {
        key: value.contiguous().view(-1).view(torch.uint8).numpy().copy()
        if value.numel()
        else np.zeros(0, np.uint8)
        for key, value in tensors.items()
    }


def digest(engine):
    """Of everything: the state as saved, the weights a forward sees, the gathered fp32 weights."""
    out = hashlib.sha256()
    state = door.state_of(engine)
    for key, value in sorted(as_bytes(state.tensors).items()):
        out.update(key.encode() + value.tobytes())
    out.update(repr(sorted(state.scalars.items())).encode())
    full = hashlib.sha256()
    for _, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            full.update(parameter.detach().float().numpy().tobytes())
        if parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
            full.update(deepspeed.utils.safe_get_full_fp32_param(parameter).numpy().tobytes())
            # With several groups DeepSpeed links the moments of the first one only.
            if "optimizer/0/exp_avg" in state.tensors and len(engine.optimizer.param_groups) == 1:
                moment = deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
                full.update(moment.numpy().tobytes())
    return [out.hexdigest()[:16], full.hexdigest()[:16]]


def form(store, generation, rank, timeout_s=20, **more):
    prefix = dist.PrefixStore(f"g{generation}", store)
    return Group.form(rank=rank, world_size=WORLD, store=prefix, timeout_s=timeout_s, **more)


def rehearse(spec, dtype):
    group = Group.form(rank=0, world_size=1, store=solo_store(), timeout_s=60)
    engine = door.build(spec, solo=True, world_size=WORLD)
    group.watch_sockets()
    step(engine, 0, 0, 1, dtype)  # one micro-batch makes a step there, whatever the job accumulates
    door.tear_down(engine)
    group.leave()


def leave(engine, group):
    door.tear_down(engine)
    group.leave()


class Rank:
    """A rank of the rollback scenarios: fault-free run, then the same steps again in other lives."""

    def __init__(self, args, slot, store):
        self.args, self.slot, self.store = args, slot, store
        self.gas, self.dtype = args.get("gas", 1), torch.bfloat16 if args.get("bf16", True) else torch.float32
        self.dtype = torch.float16 if args.get("fp16") else self.dtype
        self.spec = spec_of(args)

    def run(self, engine, first, last):
        losses = [step(engine, n, self.slot, self.gas, self.dtype) for n in range(first, last)]
        return [losses, digest(engine), engine.get_lr()]

    def life(self, generation):
        group = form(self.store, generation, self.slot)
        # A later life is loaded from a state: what its members' models held is nobody's, and differs.
        engine = door.build(self.spec, solo=False, world_size=WORLD, equal_weights=generation == 0)
        group.watch_sockets()
        return engine, group
