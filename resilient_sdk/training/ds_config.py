"""What a ds_config may say: every key known, every feature one that can be restored exactly.

Pure: a dict in, a dict or an error out. What DeepSpeed knows comes in as a `Vocabulary`, read from the
installed DeepSpeed by `engine`, so that a newer DeepSpeed's keys are not refused by an older list.
"""

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_sdk.errors import ConfigError, UnknownConfigKey

MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN = "train_batch_size"

# Optimizers whose state does not all lie in `state` and `param_groups`, or that step in a way of their own.
_REFUSED_OPTIMIZERS = frozenset(
    {"lamb", "muon", "muadam", "muadamw", "musgd", "lbfgs", "onebitadam", "onebitlamb", "zerooneadam"}
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names that the installed DeepSpeed knows. `blocks` maps a sub-block to its keys."""

    top: frozenset[str]
    blocks: Mapping[str, frozenset[str]]
    optimizers: frozenset[str]
    schedulers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes in samples: `train` for a step of the whole job, `micro` for one forward of one rank."""

    train: int
    micro: int
    accumulation: int


def check_names(config: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Raises UnknownConfigKey for a key or a type name that DeepSpeed would ignore or not find."""
    _check_keys("ds_config", config, vocabulary.top)
    for block, known in vocabulary.blocks.items():
        value = config.get(block)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"ds_config: {block} is {type(value).__name__}, not a block", fix="Write {...}")
        _check_keys(f"ds_config: {block}", value, known)
    for block, known in (("optimizer", vocabulary.optimizers), ("scheduler", vocabulary.schedulers)):
        name = (config.get(block) or {}).get("type")
        if name is not None and name not in known and str(name).lower() not in known:
            raise UnknownConfigKey(
                f"ds_config: {block}.type {name!r} is not known", fix=_did_you_mean(name, known)
            )


def check_restorable(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a feature whose state cannot be restored bit for bit. Better none than wrong."""
    for path, why in _refused(config):
        raise ConfigError(f"ds_config: {path} cannot be restored exactly ({why})", fix=f"Remove {path}")
    name = str((config.get("optimizer") or {}).get("type", "")).lower()
    if name in _REFUSED_OPTIMIZERS:
        raise ConfigError(
            f"ds_config: optimizer.type {name} cannot be restored exactly (it keeps state of its own)",
            fix="Use Adam, AdamW, Lion, Adagrad, SGD or another optimizer of torch.optim",
        )


def zero_stage(config: Mapping[str, Any]) -> int:
    """0 to 3."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def batch(config: Mapping[str, Any], world_size: int) -> Batch:
    """The three batch sizes for `world_size` ranks, completed as DeepSpeed completes them.

    Source: DeepSpeedConfig._set_batch_related_parameters and _batch_assertion, DeepSpeed 0.19.8.
    Raises ConfigError when none is given, or when the three do not agree.
    """
    train, micro, steps = (config.get(key) for key in (TRAIN, MICRO, ACCUMULATION))
    if train is None and micro is None:
        raise ConfigError(f"ds_config has neither {TRAIN} nor {MICRO}", fix=f"Set {MICRO}")
    if steps is None:
        steps = 1 if micro is None or train is None else train // micro // world_size
    if micro is None:
        micro = train // world_size // max(steps, 1) if train else 0
    if train is None:
        train = micro * steps * world_size
    if min(train, micro, steps) < 1 or train != micro * steps * world_size:
        raise ConfigError(
            f"ds_config: {TRAIN} {train} != {MICRO} {micro} x {ACCUMULATION} {steps} x {world_size} ranks",
            fix=f"Remove {TRAIN}",
        )
    return Batch(int(train), int(micro), int(steps))


def for_one_rank(config: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """A copy for a rehearsal in a group of one: the work of one rank of `world_size`.

    Without it DeepSpeed's assertion train = micro x accumulation x ranks fails in a group of one.
    """
    sizes = batch(config, world_size)
    alone = copy.deepcopy(dict(config))
    alone.pop(TRAIN, None)
    # One micro-batch makes a step there: a rehearsal is to go through the optimizer, once.
    alone[MICRO], alone[ACCUMULATION] = sizes.micro, 1
    return alone


def _check_keys(where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in given:
        if key not in known:
            raise UnknownConfigKey(
                f"{where} has an unknown key {key!r}", fix=_did_you_mean(key, known), key=key
            )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), sorted(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else "Remove it"


def _on(config: Mapping[str, Any], block: str, key: str = "enabled") -> bool:
    value = config.get(block)
    return isinstance(value, Mapping) and bool(value.get(key, False))


def _refused(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(path, reason) of every feature of `config` that this package does not restore."""
    zero = config.get("zero_optimization") or {}
    offload = [
        (f"zero_optimization.{key}", "its state lies outside the engine's own memory")
        for key in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param")
        if _offloads(zero.get(key))
    ]
    zero_plus = [
        (f"zero_optimization.{key}", "its rounding or its extra copies are not part of the saved state")
        for key in ("zenflow", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
                    "zero_quantized_gradients", "elastic_checkpoint", "legacy_stage1")
        if zero.get(key)
    ]  # fmt: skip
    if int(zero.get("zero_hpz_partition_size", 1) or 1) > 1:
        zero_plus.append(("zero_optimization.zero_hpz_partition_size", "a second partition of each weight"))
    blocks = [
        (block, why)
        for block, key, why in (
            ("data_efficiency", "enabled", "its sampler and layer dropping keep state of their own"),
            ("autotuning", "enabled", "it ends the process by itself"),
            ("hybrid_engine", "enabled", "an engine of another kind"),
            ("expert_parallel", "enabled", "experts live on some ranks only"),
            ("compile", "deepcompile", "its compiled graphs outlive the engine"),
            ("amp", "enabled", "apex keeps state of its own"),
        )
        if _on(config, block, key)
    ]
    blocks += [
        (key, "it changes weights outside the optimizer")
        for key in ("compression_training",)
        if config.get(key)
    ]
    if int((config.get("tensor_parallel") or {}).get("autotp_size", 0) or 0) > 1:
        blocks.append(("tensor_parallel", "a weight lies on several ranks"))
    if int(config.get("sequence_parallel_size", 1) or 1) > 1:
        blocks.append(("sequence_parallel_size", "its groups are not formed again"))
    autocast = config.get("torch_autocast") or {}
    if autocast.get("enabled") and autocast.get("dtype") in ("float16", "fp16", "half"):
        blocks.append(("torch_autocast.dtype float16", "its gradient scaler keeps state of its own"))
    return offload + zero_plus + blocks


def _offloads(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("device", "none") not in (None, "none")
    return bool(value)
