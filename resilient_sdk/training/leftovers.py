"""What DeepSpeed keeps per process, and how each is put back. Gets the package, never imports it.

Found in DeepSpeed 0.19.8; each was seen to break or to leak when an engine is built again in one process.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


def reset(deepspeed: Any) -> None:
    """All process groups gone, and everything DeepSpeed keeps per process as a fresh process has it."""
    for step in (_reset_groups, _reset_zero3, _reset_names, _reset_checkpointing, _reset_backward):
        attempt(step, deepspeed)


def attempt(step: Callable[[Any], None], subject: Any) -> None:
    # One step's failure (a half-built engine lacks an attribute) must not leave the later ones undone.
    try:
        step(subject)
    except Exception:  # noqa: BLE001
        _LOG.debug("while an engine was torn down: %s", getattr(step, "__name__", step), exc_info=True)


def _reset_groups(deepspeed: Any) -> None:
    p2p, groups = deepspeed.runtime.pipe.p2p, deepspeed.utils.groups
    p2p._groups = p2p._grid = None
    # Not torch's own: that leaves DeepSpeed's copies of the groups, and the next build fails on them.
    if torch.distributed.is_initialized():
        if deepspeed.comm.comm.cdb is None:
            torch.distributed.destroy_process_group()
        else:
            deepspeed.comm.destroy_process_group()
    groups._release_process_group_references(None)


def _reset_zero3(deepspeed: Any) -> None:
    torch_autocast, zero = deepspeed.runtime.torch_autocast, deepspeed.runtime.zero
    parameter_offload, partition_parameters = zero.parameter_offload, zero.partition_parameters
    init = partition_parameters.Init
    base = partition_parameters.InsertPostInitMethodToModuleSubClasses
    if partition_parameters.top_level_context is not None:
        partition_parameters.top_level_context.unpatch_init_and_builtins()  # else torch.empty stays patched
    partition_parameters.top_level_context = partition_parameters.temp_contiguous_tensor = None
    partition_parameters.zero_init_context = 0
    partition_parameters.empty_buffers.clear()
    partition_parameters.AllGatherCoalescedHandle.data_buffer.clear()
    # A survivor's counters go on where a fresh process starts at 0, and ranks compare these ids.
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0
    base.num_module_parameters = base.num_module_elements = 0
    offload = parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()
    coordinator = zero.partitioned_param_coordinator.PartitionedParameterCoordinator
    # lru_cache on a method, under a decorator: it keeps every engine's model for the life of the process.
    for cell in coordinator._PartitionedParameterCoordinator__params_to_release.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    if hasattr(base, "linear_bk"):
        torch.nn.functional.linear = base.linear_bk
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def _reset_names(deepspeed: Any) -> None:
    deepspeed.utils.debug.debug_clear_module_and_param_names()


def _reset_checkpointing(deepspeed: Any) -> None:
    checkpointing = deepspeed.runtime.activation_checkpointing.checkpointing
    # A fault between forward and backward leaves its buffers and offsets. The user's own settings stay.
    for name in ("contiguous_data_buffers", "data_offsets", "contiguous_size_buffers", "size_offsets"):
        getattr(checkpointing, name).clear()
    checkpointing.mp_group = checkpointing.timers = checkpointing._cpu_offload_engine = None
    for name in ("buffer_0", "buffer_1"):
        with suppress(AttributeError):
            delattr(checkpointing, name)


def _reset_backward(deepspeed: Any) -> None:
    tracker = deepspeed.runtime.engine._ENGINE_BACKWARD_GRAPH_TRACKER
    with tracker._lock:
        tracker._active_states.clear()
        tracker._graph_task_refcounts.clear()
