"""The whole state of a DeepSpeed engine as live tensors and plain values, and the exact inverse.

Never imports deepspeed: the optimizer's kind is told by the attributes it has. Names and order of the
tensors depend on the model and the ds_config only, so every rank's next life finds its own again:

    master/<i>                 what the optimizer steps, fp32: a rank's partition (ZeRO) or a parameter's copy
    optimizer/<i>/<name>       the optimizer's state tensor <name> of master i (Adam's exp_avg, ...)
    parameter/<name>           a module's parameter that has no master; ZeRO-3: this rank's partition of it
    buffer/<name>              a module's buffer

16-bit weights are not in it: they are the masters, cast. `load` casts and gathers them as a step does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from resilient_sdk.errors import CheckpointError, ConfigError
from resilient_sdk.training.engine_scalars import (
    BATCH,
    ENGINE,
    OPTIMIZER,
    decode,
    dtype_name,
    encode,
    encode_items,
    load_scheduler,
    pick,
    plain_items,
    put,
    read_scheduler,
    scaler_of,
)

Value = torch.Tensor | np.ndarray[Any, np.dtype[np.uint8]]
"""A tensor, or its bytes: 1-dimensional uint8, in row-major order."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class EngineState:
    """`tensors` share memory with the engine: copy them before it steps again. `scalars` is a copy.

    `scalars` holds plain Python values only, a few hundred bytes a tensor, and pickles.
    """

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Layout:
    kind: str  # zero3 | zero12 | bf16 | fused | unfused | plain
    outer: Any  # what engine.optimizer is
    inner: Any  # the torch optimizer in it
    masters: list[torch.Tensor]
    cast: list[torch.Tensor]  # module parameters that are casts of masters


def read(engine: Any) -> EngineState:
    """The engine's state between two steps. Raises ConfigError for an optimizer it cannot read whole."""
    layout = _layout(engine)
    tensors: dict[str, torch.Tensor] = {}
    in_module = {id(parameter) for parameter in engine.module.parameters()}
    for index, master in enumerate(layout.masters):
        if id(master) not in in_module:
            tensors[f"master/{index}"] = master.detach()
    loose = _read_optimizer_state(layout, tensors)
    for name, home in _parameters(engine, layout, with_cast=_never_stepped(engine, layout)):
        tensors[f"parameter/{name}"] = home.detach()
    for name, buffer in engine.module.named_buffers():
        tensors[f"buffer/{name}"] = buffer.detach()
    scalars = {
        "format": _FORMAT,
        "kind": layout.kind,
        "tensors": {key: (dtype_name(value.dtype), tuple(value.shape)) for key, value in tensors.items()},
        "state": loose,
        "groups": [encode_items(group, "param_groups") for group in layout.inner.param_groups],
        "optimizer": plain_items(layout.inner),
        "wrapper": pick(layout.outer, OPTIMIZER),
        "scaler": plain_items(scaler_of(layout.outer)),
        "scheduler": read_scheduler(engine.lr_scheduler),
        "engine": pick(engine, ENGINE),
        "batch": pick(engine._config, BATCH),
        "in_eval": [name for name, module in engine.named_modules() if not module.training],
    }
    return EngineState(tensors, scalars)


@torch.no_grad()
def load(engine: Any, tensors: Mapping[str, Value], scalars: Mapping[str, Any]) -> None:
    """Makes `engine` the one that `read` saw, in place. All ranks together: the weights are gathered.

    For an engine just built, or one between two steps. Raises CheckpointError when the state is of another
    model, ds_config or format; the engine is not to be used then.
    """
    layout = _layout(engine)
    _check(layout, tensors, scalars)
    if layout.kind == "zero3":
        # Writes into a partition are lost on a parameter that is gathered: give the gathered ones back.
        layout.outer._partition_all_parameters()
    homes = _homes(engine, layout, scalars)
    _load_optimizer_state(layout, tensors, scalars)
    cast = {id(parameter) for parameter in layout.cast}
    late = {key for key, home in homes.items() if key in tensors and id(home) in cast}
    for key, value in tensors.items():
        if not key.startswith("optimizer/") and key not in late:
            _copy(homes[key], value, key)
    _recast(layout)
    for key in late:  # saved before the first step, when a 16-bit weight is no cast of its master
        _copy(homes[key], tensors[key], key)
    for parameter in engine.module.parameters():
        parameter.grad = None
    _load_scalars(engine, layout, scalars)


@torch.no_grad()
def clear_padding(engine: Any) -> None:
    """Zeros what fills up ZeRO-3's partitions, for an engine just built.

    DeepSpeed leaves it uninitialized, and the optimizer keeps it: without this the saved state of two equal
    runs differs, although no weight does.
    """
    layout = _layout(engine) if engine.optimizer is not None else None
    if layout is None or layout.kind != "zero3":
        return
    for group, master in zip(
        layout.outer.fp16_groups, layout.outer.fp32_partitioned_groups_flat, strict=True
    ):
        offset = 0
        for parameter in group:
            used, size = _used(parameter), parameter.partition_numel()
            master.data[offset + used : offset + size] = 0
            offset += size
    for parameter in engine.module.parameters():
        parameter.ds_tensor.data.view(-1)[_used(parameter) :] = 0


def _used(parameter: Any) -> int:
    size = int(parameter.partition_numel())
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    return max(0, min(size, int(parameter.ds_numel) - rank * size))


def _layout(engine: Any) -> _Layout:
    outer = engine.optimizer
    if outer is None:
        raise ConfigError(
            "The engine has no optimizer, so there is nothing to train", fix="Set optimizer in ds_config"
        )
    for kind, masters, cast in (
        ("zero3", "fp32_partitioned_groups_flat", "fp16_groups"),
        ("zero12", "single_partition_of_fp32_groups", "bit16_groups"),
        ("bf16", "fp32_groups_flat_partition", "bf16_groups"),
        ("fused", "fp32_groups_flat", "fp16_groups"),
        ("unfused", "fp32_groups", "fp16_groups"),
    ):
        if hasattr(outer, masters):
            return _Layout(
                kind, outer, outer.optimizer, _flat(getattr(outer, masters)), _flat(getattr(outer, cast))
            )
    own = [parameter for group in outer.param_groups for parameter in group["params"]]
    return _Layout("plain", outer, outer, own, [])


def _flat(groups: list[Any]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for group in groups:
        flat.extend([group] if isinstance(group, torch.Tensor) else group)
    return flat


def _never_stepped(engine: Any, layout: _Layout) -> bool:
    # FP16_UnfusedOptimizer and FP16_Optimizer step once with zero gradients when built: AdamW then decays the
    # masters and not the 16-bit weights, which stay what they were until the first real step.
    return layout.kind in ("fused", "unfused") and engine.global_steps == engine.skipped_steps


def _parameters(engine: Any, layout: _Layout, *, with_cast: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the tensor that holds it) of every parameter that is not the cast of a master."""
    cast = set() if with_cast else {id(parameter) for parameter in layout.cast}
    for name, parameter in engine.module.named_parameters():
        if id(parameter) not in cast:
            yield name, getattr(parameter, "ds_tensor", parameter)


def _read_optimizer_state(layout: _Layout, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    index_of = {id(master): index for index, master in enumerate(layout.masters)}
    loose: dict[str, Any] = {}
    for owner, state in layout.inner.state.items():
        if id(owner) not in index_of:
            if state or not isinstance(state, dict):
                raise ConfigError(
                    f"{type(layout.inner).__name__} keeps state that belongs to no parameter",
                    fix="Use an optimizer of torch.optim",
                )
            continue
        for name, value in state.items():
            key = f"optimizer/{index_of[id(owner)]}/{name}"
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[key] = value.detach()
            else:
                loose[key] = encode(value, key)
    return loose


def _check(layout: _Layout, tensors: Mapping[str, Value], scalars: Mapping[str, Any]) -> None:
    if scalars.get("format") != _FORMAT:
        raise CheckpointError(
            f"The state has format {scalars.get('format')}, this is {_FORMAT}", fix="Update the package"
        )
    if scalars["kind"] != layout.kind or len(scalars["groups"]) != len(layout.inner.param_groups):
        raise CheckpointError(
            f"The state is of a {scalars['kind']} engine with {len(scalars['groups'])} parameter groups, "
            f"this one is {layout.kind} with {len(layout.inner.param_groups)}",
            fix="Use the ds_config it was saved with",
        )
    odd = sorted(set(tensors) ^ set(scalars["tensors"]))
    if odd:
        raise CheckpointError(f"The state has {len(odd)} tensors too many or too few, first {odd[0]!r}")


def _homes(engine: Any, layout: _Layout, scalars: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Where each saved tensor, except optimizer state, goes. Raises CheckpointError if one has no place."""
    homes = {f"master/{index}": master for index, master in enumerate(layout.masters)}
    homes |= {f"parameter/{name}": home for name, home in _parameters(engine, layout, with_cast=True)}
    homes |= {f"buffer/{name}": buffer for name, buffer in engine.module.named_buffers()}
    for key, (dtype, shape) in scalars["tensors"].items():
        if key.startswith("optimizer/"):
            continue
        home = homes.get(key)
        if (
            home is not None
            and key.startswith("buffer/")
            and (dtype_name(home.dtype), tuple(home.shape)) != (dtype, shape)
        ):
            # A buffer may grow while training (a cache of positions): its new life needs a new tensor.
            home = homes[key] = _replace_buffer(engine.module, key.removeprefix("buffer/"), dtype, shape)
        if home is None or (dtype_name(home.dtype), tuple(home.shape)) != (dtype, tuple(shape)):
            seen = "nothing" if home is None else f"{dtype_name(home.dtype)} {tuple(home.shape)}"
            raise CheckpointError(f"{key} is {dtype} {tuple(shape)} in the state and {seen} in this engine")
    return homes


def _replace_buffer(module: nn.Module, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old = owner._buffers[leaf]
    new = torch.empty(shape, dtype=getattr(torch, dtype), device=old.device if old is not None else None)
    owner._buffers[leaf] = new
    return new


def _load_optimizer_state(layout: _Layout, tensors: Mapping[str, Value], scalars: Mapping[str, Any]) -> None:
    """In place where it exists; torch optimizers create theirs at the first step: else create or remove."""
    saved: dict[int, dict[str, str]] = {}
    for key in [*(k for k in tensors if k.startswith("optimizer/")), *scalars["state"]]:
        _, index, name = key.split("/", 2)
        saved.setdefault(int(index), {})[name] = key
    for index, master in enumerate(layout.masters):
        wanted = saved.get(index, {})
        if not wanted:
            layout.inner.state.pop(master, None)
            continue
        state = layout.inner.state[master]
        for name in set(state) - set(wanted):
            del state[name]
        for name, key in wanted.items():
            if key in scalars["state"]:
                state[name] = decode(scalars["state"][key], state.get(name))
                continue
            dtype, shape = scalars["tensors"][key]
            if name not in state or state[name].shape != torch.Size(shape):
                state[name] = _like(master, getattr(torch, dtype), shape)
            _copy(state[name], tensors[key], key)


def _like(master: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if master.shape == torch.Size(shape):
        return torch.empty_like(master, dtype=dtype, requires_grad=False)  # keeps channels_last and the like
    return torch.empty(shape, dtype=dtype, device=master.device)


def _copy(home: torch.Tensor, value: Value, key: str) -> None:
    """Bytes into `home`. Raises CheckpointError when they are not as many as it holds."""
    if isinstance(value, torch.Tensor):
        if value.dtype != home.dtype or value.numel() != home.numel():
            raise CheckpointError(
                f"{key} is {value.dtype} x {value.numel()}, its place {home.dtype} x {home.numel()}"
            )
        home.data.copy_(value.view(home.shape) if value.is_contiguous() else value)
        return
    if value.nbytes != home.numel() * home.element_size():
        raise CheckpointError(
            f"{key} has {value.nbytes} bytes, its place {home.numel() * home.element_size()}"
        )
    direct = home.data.is_contiguous() and home.device.type == "cpu"
    target = home.data if direct else torch.empty(home.shape, dtype=home.dtype)
    if target.numel():
        # By numpy: torch.from_numpy warns about read-only memory, and a mapped chunk is read-only.
        target.view(-1).view(torch.uint8).numpy()[:] = value.reshape(-1)
    if not direct:
        home.data.copy_(target)


def _recast(layout: _Layout) -> None:
    """Builds the 16-bit weights from the masters, and gathers them, with the very calls of a step."""
    {"zero3": _recast_zero3, "zero12": _recast_flat, "bf16": _recast_flat, "fused": _recast_fused}.get(
        layout.kind, _recast_each
    )(layout)


def _recast_zero3(layout: _Layout) -> None:
    outer = layout.outer
    for sub_group in range(len(outer.fp16_groups)):
        outer._reassign_or_swap_out_partitioned_parameters(sub_group)
    if len(outer.persistent_parameters) > 0:
        outer.persistent_parameters[0].all_gather(outer.persistent_parameters)


def _recast_flat(layout: _Layout) -> None:
    outer = layout.outer
    outer.update_lp_params()
    # safe_get_full_optimizer_state reads through links made once: they would show tensors no longer in use.
    outer._hp_optimizer_states_linked = False
    if layout.masters and all(layout.inner.state.get(master) for master in layout.masters):
        outer._lazy_init_hp_params_optimizer_state()
    if layout.kind == "bf16":
        outer.clear_hp_grads()


def _recast_fused(layout: _Layout) -> None:
    outer = layout.outer
    for flat, group in zip(outer.fp32_groups_flat, outer.fp16_groups, strict=True):
        parts = torch._utils._unflatten_dense_tensors(flat.data, group)  # type: ignore[no-untyped-call]
        for parameter, master in zip(group, parts, strict=True):
            parameter.data.copy_(master)


def _recast_each(layout: _Layout) -> None:
    # FP16_UnfusedOptimizer; a plain optimizer has no casts.
    if layout.cast:
        for parameter, master in zip(layout.cast, layout.masters, strict=True):
            parameter.data.copy_(master.data)


def _load_scalars(engine: Any, layout: _Layout, scalars: Mapping[str, Any]) -> None:
    for group, saved in zip(layout.inner.param_groups, scalars["groups"], strict=True):
        for name in [name for name in group if name != "params" and name not in saved]:
            del group[name]
        for name, value in saved.items():
            group[name] = decode(value, group.get(name))
    put(layout.inner, scalars["optimizer"])
    put(layout.outer, scalars["wrapper"])
    put(scaler_of(layout.outer), scalars["scaler"])
    load_scheduler(engine.lr_scheduler, scalars["scheduler"])
    put(engine, scalars["engine"])
    put(engine._config, scalars["batch"])
    in_eval = set(scalars["in_eval"])
    for name, module in engine.named_modules():
        module.training = name not in in_eval
