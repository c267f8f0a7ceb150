"""The one door to DeepSpeed: build an engine, read and load its state, tear it down without a trace.

In one process, many times: a rank that survives a fault leaves its broken group and builds again. DeepSpeed
keeps process-wide state that an engine leaves behind; `tear_down` resets all of it. Source: DeepSpeed 0.19.8.
"""

import copy
import gc
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from resilient_sdk.errors import ConfigError, NeedsModelFactory
from resilient_sdk.training import ds_config, leftovers, zero_state
from resilient_sdk.training.ds_vocabulary import vocabulary
from resilient_sdk.training.leftovers import attempt
from resilient_sdk.training.zero_state import EngineState, Value

# What the first deepspeed.initialize of a process imports: 1,538 modules, 3 s. These few pull in all of them.
_IMPORTED_LATE = (
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.comm.mori",
)
_PASSED_ON = ("distributed_port",)
_IGNORED = {"args": None, "dist_init_required": None, "config_params": None, "collate_fn": None}


def _deepspeed() -> Any:
    """DeepSpeed, imported at the first use: it takes seconds, and a process that only looks on needs none."""
    if not torch.cuda.is_available():
        # DeepSpeed otherwise asks for every kind of accelerator, with an import each.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # noqa: TID251 (DeepSpeed reads it while it is imported)
    import deepspeed
    import deepspeed.ops

    # Its shared-memory collective spins forever when a peer dies, and a rank killed while it is compiled
    # leaves a lock file that hangs every later start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def preload() -> None:
    """For a process that only forks: imports all that a first build imports. No thread, no group, no CUDA.

    numpy's own threads (OpenBLAS) start when numpy is imported, before this: OMP_NUM_THREADS=1 prevents it.
    What is imported then stays out of Python's collector: a child's collections are short, its pages shared.
    """
    _deepspeed()
    _import_muon_uncompiled()
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _import_muon_uncompiled() -> None:
    """Muon compiles three functions as it is imported, and DeepSpeed imports it for every optimizer: that alone
    pulls in torch's code generator, 600 modules and a second. Muon itself is refused here (see ds_config)."""
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    compile_later = compiler.compile
    compiler.compile = lambda *_arguments, **_options: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_later


@dataclass(frozen=True)
class EngineSpec:
    """What deepspeed.initialize is called with at every build. Make it by `from_arguments`."""

    model: nn.Module | Callable[[], nn.Module]
    config: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    model_parameters: list[Any] | Callable[[nn.Module], Iterable[Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_arguments(cls, **arguments: Any) -> "EngineSpec":
        """From deepspeed.initialize's own keyword arguments; `config` is a dict or the path of a JSON file.

        Raises UnknownConfigKey, NeedsModelFactory (ZeRO-3 and a model instead of a function that makes one),
        and ConfigError for anything that cannot be built again or not be restored exactly.
        """
        _check_arguments(arguments)
        config = _read_config(arguments)
        ds_config.check_names(config, vocabulary(_deepspeed()))
        ds_config.check_restorable(config)
        _check_values(config)
        model, parameters = arguments.get("model"), arguments.get("model_parameters")
        if isinstance(model, nn.Module):
            if ds_config.zero_stage(config) == 3:
                raise NeedsModelFactory(
                    "ZeRO-3 partitions a model for good, so it must be made again at each recovery",
                    fix="Pass model=build_model, a function without arguments that returns the model",
                )
            _check_model(model)
            if parameters is not None and not callable(parameters):
                parameters = list(parameters)  # a generator would be empty at the second build
        elif not callable(model):
            raise ConfigError(
                f"model is {type(model).__name__}",
                fix="Pass a torch.nn.Module, or a function that returns one",
            )
        elif parameters is not None and not callable(parameters):
            raise ConfigError(
                "model_parameters belong to one model, and model is a function that makes new ones",
                fix="Pass model_parameters=lambda model: ..., or leave it out",
            )
        extra = {name: arguments[name] for name in _PASSED_ON if name in arguments}
        return cls(
            model, config, arguments.get("optimizer"), arguments.get("lr_scheduler"), parameters, extra
        )

    @property
    def zero_stage(self) -> int:
        return ds_config.zero_stage(self.config)

    def micro_batch_size(self, world_size: int) -> int:
        """Samples of one rank in one forward. Raises ConfigError if the batch sizes do not agree."""
        return ds_config.batch(self.config, world_size).micro

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches in a step. Raises ConfigError if the batch sizes do not agree."""
        return ds_config.batch(self.config, world_size).accumulation


def build(spec: EngineSpec, *, solo: bool, world_size: int, equal_weights: bool = True) -> Any:
    """A DeepSpeed engine in the group that is formed (all its ranks together).

    solo: a rehearsal in a group of one for a job of `world_size`; `tear_down` undoes what it did to the
    model. equal_weights: all get rank 0's, as DeepSpeed does it; without it the engine must be loaded before it
    is used, and the group saves a broadcast of the whole model, a third of a rebuild. ZeRO 0 to 2 keep one
    model for every build; ZeRO 3 makes a new one each time. Raises what DeepSpeed or the user's functions
    raise, after everything process-wide is reset.
    """
    deepspeed = _deepspeed()
    undo: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    try:
        model = _model_for_build(spec)
        if solo and spec.zero_stage < 3:
            undo.append((model, _copies(model)))
        config = ds_config.for_one_rank(spec.config, world_size) if solo else copy.deepcopy(spec.config)
        # ZeRO-3 formats its arguments for a message it does not print: every weight, 40 % of a build.
        with torch._tensor_str.printoptions(threshold=0, edgeitems=1), _broadcast(equal_weights):
            engine, *_ = deepspeed.initialize(
                model=model,
                config=config,
                optimizer=spec.optimizer,
                lr_scheduler=spec.lr_scheduler,
                model_parameters=_parameters(spec, model),
                **spec.extra,
            )
        zero_state.clear_padding(engine)
    except BaseException as error:
        tear_down(_half_built(error, deepspeed.DeepSpeedEngine))
        _clean(spec._kept)
        _undo(undo)
        raise
    engine.__dict__.update(_resilient_undo=undo, _resilient_kept=spec._kept)
    return engine


@contextmanager
def _broadcast(wanted: bool) -> Iterator[None]:
    kind = _deepspeed().DeepSpeedEngine
    broadcast = kind._broadcast_model
    if not wanted:
        kind._broadcast_model = _leave_weights
    try:
        yield
    finally:
        kind._broadcast_model = broadcast


def _leave_weights(_engine: Any) -> None:
    """What is loaded next overwrites them."""


def tear_down(engine: Any | None) -> None:
    """Destroys the engine, every process group, and all that DeepSpeed keeps in the process.

    For an engine in any state, a half-built one, or None (a build failed). Its model lives on when the spec
    keeps it; the engine object is emptied, so that who still holds it (a traceback) keeps nothing alive.
    """
    if engine is not None:
        for step in (_remove_hooks, _destroy, _close_monitors):
            attempt(step, engine)
        _undo(engine.__dict__.get("_resilient_undo", []))
        _clean(engine.__dict__.get("_resilient_kept", {}))
        _empty(engine)
    reset_process_state()
    gc.collect()


def state_of(engine: Any) -> EngineState:
    """The engine's whole state between two steps: live tensors to copy, and scalars. See `zero_state`."""
    return zero_state.read(engine)


def load_state(engine: Any, tensors: Mapping[str, Value], scalars: Mapping[str, Any]) -> None:
    """The exact inverse of `state_of`, in place; every rank calls it together. See `zero_state.load`."""
    zero_state.load(engine, tensors, scalars)


def at_boundary(engine: Any) -> bool:
    """Whether the engine.step() to come ends a step of the job. Ask before engine.step(), not after."""
    return not engine.managed_gradient_accumulation() or bool(engine.is_gradient_accumulation_boundary())


def rank_modules() -> tuple[Any, Any]:
    """Where the user's code may ask for its rank instead of asking the job."""
    return torch.distributed, _deepspeed().comm


def reset_process_state() -> None:
    """All process groups gone, and everything DeepSpeed keeps per process as a fresh process has it."""
    leftovers.reset(_deepspeed())


# ---- from_arguments


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    known = {
        "model",
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
        "mpu",
        "config",
        "mesh_param",
    }
    known |= {*_PASSED_ON, *_IGNORED}
    for name in sorted(set(arguments) - known):
        raise ConfigError(f"deepspeed.initialize has no argument {name!r}", fix="Remove it")
    if arguments.get("training_data") is not None:
        raise ConfigError(
            "training_data is not taken", fix="Give the loader to job.steps(loader), which can replay it"
        )
    for name in ("mpu", "mesh_param"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{name}: model and sequence parallelism cannot be restored", fix=f"Remove {name}"
            )
    for name, made in (("optimizer", "params"), ("lr_scheduler", "optimizer")):
        value = arguments.get(name)
        if value is not None and (hasattr(value, "step") and not isinstance(value, type)):
            raise ConfigError(
                f"{name} is bound to one model's life", fix=f"Pass a function: {name}=lambda {made}: ..."
            )
        if value is not None and not callable(value):
            raise ConfigError(
                f"{name} is {type(value).__name__}", fix=f"Pass a function: {name}=lambda {made}: ..."
            )


def _read_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = arguments.get("config")
    given = arguments.get("config_params") if given is None else given
    given = getattr(arguments.get("args"), "deepspeed_config", None) if given is None else given
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"config is {type(given).__name__}", fix="Pass ds_config as a dict or the path of a JSON file"
        )
    if not Path(given).is_file():
        raise ConfigError(
            f"There is no file {os.fspath(given)}", fix="Pass ds_config as a dict or an existing JSON file"
        )
    _deepspeed()
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        config = load_ds_config(os.fspath(given))
    except ValueError as error:
        raise ConfigError(f"{os.fspath(given)} is not JSON: {error}", fix="Correct the file") from error
    return cast("dict[str, Any]", config)


def _check_values(config: dict[str, Any]) -> None:
    """Lets DeepSpeed itself parse the config, in a world of one: a wrong value fails here, in one line."""
    trial = copy.deepcopy(config)
    if ds_config.MICRO in trial or ds_config.TRAIN not in trial:
        ds_config.batch({**trial, ds_config.TRAIN: None}, 1)
    trial.pop(ds_config.TRAIN, None)
    trial.setdefault(ds_config.MICRO, 1)
    try:
        _deepspeed().DeepSpeedConfig(trial)
    except Exception as error:  # DeepSpeedConfigError derives from Exception, others are of many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"ds_config is refused by DeepSpeed: {reason}", fix="Correct that value") from error


def _check_model(model: nn.Module) -> None:
    deepspeed = _deepspeed()
    from deepspeed.moe.layer import MoE

    if isinstance(model, deepspeed.PipelineModule):
        raise ConfigError(
            "A PipelineModule cannot be restored", fix="Use ZeRO instead of pipeline parallelism"
        )
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            raise ConfigError(
                f"{name} is a DeepSpeed MoE layer, whose experts cannot be restored", fix="Use dense layers"
            )


# ---- build


def _model_for_build(spec: EngineSpec) -> nn.Module:
    kept = cast("nn.Module | None", spec._kept.get("model"))
    if kept is None:
        kept = spec.model if isinstance(spec.model, nn.Module) else spec.model()
        if not isinstance(kept, nn.Module):
            raise ConfigError(f"model() returned {type(kept).__name__}", fix="Return a torch.nn.Module")
        _check_model(kept)
        if spec.zero_stage == 3:
            return kept
        spec._kept["model"] = kept
        spec._kept["attributes"] = {name: set(vars(p)) for name, p in kept.named_parameters()}
    return kept


def _clean(kept: Mapping[str, Any]) -> None:
    """Takes off the kept model what an engine left on its parameters."""
    if "model" not in kept:
        return
    for name, parameter in kept["model"].named_parameters():
        # Gradients of a broken step would be added to the next one's; links hold an old optimizer and group.
        parameter.grad = None
        for attribute in set(vars(parameter)) - kept["attributes"].get(name, set()):
            delattr(parameter, attribute)


def _parameters(spec: EngineSpec, model: nn.Module) -> list[Any] | None:
    given = spec.model_parameters
    if given is None:
        return None
    listed = list(given(model)) if callable(given) else list(given)
    # Copies of the groups: torch and ZeRO write their own parameters and defaults into the very dicts.
    return [{**item, "params": list(item["params"])} if isinstance(item, dict) else item for item in listed]


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def _undo(undo: list[tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
    """Gives a rehearsed model its own weights back, in their own dtype."""
    while undo:
        model, copies = undo.pop()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in copies:
                tensor.data = copies[name]
            tensor.grad = None


# ---- tear_down


def _half_built(error: BaseException, kind: type[Any]) -> Any | None:
    """The engine whose making failed, found in the traceback: nobody else has it, and its hooks are set."""
    engine, trace = None, error.__traceback__
    while trace is not None:
        maker = trace.tb_frame.f_locals.get("self")
        if isinstance(maker, kind):
            engine = maker
        for hook in getattr(maker, "_grad_acc_hooks", []):
            hook.remove()
        trace = trace.tb_next
    return engine


def _remove_hooks(engine: Any) -> None:
    # destroy() leaves these two on the model, which would run and keep every earlier engine.
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = engine.__dict__.get(name)
        if hook is not None:
            hook.remove()


def _destroy(engine: Any) -> None:
    engine.destroy()


def _close_monitors(engine: Any) -> None:
    # A tensorboard writer has a thread and a file of its own, and the next build opens another.
    writer = getattr(getattr(engine.monitor, "tb_monitor", None), "summary_writer", None)
    if writer is not None:
        writer.close()


def _empty(engine: Any) -> None:
    """Cuts the engine's references, so that tensors and groups go now and not with the last traceback."""
    optimizer = engine.__dict__.get("optimizer")
    for holder in (
        getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None),
        getattr(optimizer, "parameter_offload", None),
        getattr(optimizer, "optimizer", None),
        optimizer,
        engine,
    ):
        if hasattr(holder, "__dict__"):
            holder.__dict__.clear()
