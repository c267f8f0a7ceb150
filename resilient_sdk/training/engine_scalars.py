"""The numbers of an engine that are not tensors: counters, hyper-parameters, loss scale, schedule.

Read into plain Python values that pickle, and written back exactly. Never imports deepspeed.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from resilient_sdk.errors import CheckpointError, ConfigError

_PLAIN = (bool, int, float, str, type(None))
# What a step changes on the engine (DeepSpeed 0.19.8: __init__, backward, _take_model_step, step).
ENGINE = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "_unmanaged_backward_count",
    "_step_applied",
    "_global_grad_norm",
    "_is_gradient_accumulation_boundary",
    "warn_unscaled_loss",
)
# ... and on its optimizers (ZeRO 1/2/3, BF16_Optimizer, FP16_Optimizer and FP16_UnfusedOptimizer).
OPTIMIZER = (
    "_global_grad_norm",
    "_is_gradient_accumulation_boundary",
    "clip_grad",
    "custom_loss_scaler",
    "dynamic_loss_scale",
    "external_loss_scale",
    "micro_step_id",
    "overflow",
)
# set_train_batch_size and set_train_micro_batch_size write here.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def scaler_of(outer: Any) -> Any:
    return getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)


def read_scheduler(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    # DeepSpeed's schedulers leave _last_lr out of their state_dict, and get_lr() of the engine reads it.
    last = getattr(scheduler, "_last_lr", None)
    return {
        "state": copy.deepcopy(scheduler.state_dict()),
        "last_lr": None if last is None else [float(x) for x in last],
    }


def load_scheduler(scheduler: Any, saved: dict[str, Any] | None) -> None:
    if (scheduler is None) != (saved is None):
        raise CheckpointError("The state and this engine differ in having an lr scheduler")
    if saved is None:
        return
    scheduler.load_state_dict(copy.deepcopy(saved["state"]))
    if saved["last_lr"] is not None:
        scheduler._last_lr = list(saved["last_lr"])


def pick(holder: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: encode(getattr(holder, name), name) for name in names if hasattr(holder, name)}


def plain_items(holder: Any) -> dict[str, Any]:
    """The holder's own numbers and strings, with an optimizer's counters that are not in its `state`."""
    return (
        {name: value for name, value in vars(holder).items() if type(value) in _PLAIN}
        if holder is not None
        else {}
    )


def put(holder: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        setattr(holder, name, decode(value, getattr(holder, name, None)))


def encode_items(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {name: encode(value, f"{where}: {name}") for name, value in group.items() if name != "params"}


def encode(value: Any, where: str) -> Any:
    """A 0-dimensional tensor (Adam's step, a capturable lr, a norm) as its exact number, dtype and device."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"dtype": dtype_name(value.dtype), "device": value.device.type, "value": value.item()}
    if isinstance(value, list | tuple):
        return type(value)(encode(item, where) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(
        f"The optimizer's {where} is a {type(value).__name__}, which cannot be restored exactly",
        fix="Use an optimizer of torch.optim",
    )


def decode(value: Any, present: Any) -> Any:
    """The inverse; `present` is what stands in its place now, and is kept if it is such a tensor."""
    if isinstance(value, list | tuple):
        return type(value)(decode(item, None) for item in value)
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"])
    if isinstance(present, torch.Tensor) and present.dim() == 0 and present.dtype == dtype:
        return present.fill_(value["value"])
    return torch.tensor(value["value"], dtype=dtype, device=value["device"])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
