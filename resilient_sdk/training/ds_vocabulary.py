"""Which keys and names of a ds_config the installed DeepSpeed knows. Gets the package, never imports it."""

from typing import Any

import torch

from resilient_sdk.training.ds_config import MICRO, Vocabulary


class _Asked(dict[str, Any]):
    """A ds_config that remembers which keys DeepSpeed asked it for: those are the keys it knows."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in config.keys()` comes back to __contains__


def vocabulary(deepspeed: Any) -> Vocabulary:
    """The names that this DeepSpeed knows, read from itself: a newer one's new keys are then known too."""
    runtime = deepspeed.runtime
    config, precision_config = runtime.config, runtime.precision_config

    asked = _Asked({MICRO: 1})
    deepspeed.DeepSpeedConfig(asked)
    bf16 = frozenset(precision_config.DeepSpeedBF16Config.model_fields)
    torch_optimizers = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    schedulers = {name for name, kind in vars(torch.optim.lr_scheduler).items() if isinstance(kind, type)}
    return Vocabulary(
        top=frozenset(asked.asked) | {"sequence_parallel_size", "data_parallel_size"},
        blocks={
            "zero_optimization": _fields(runtime.zero.config.DeepSpeedZeroConfig)
            | set(config._REMOVED_ZERO_CONFIG_KEYS),
            "bf16": bf16,
            "bfloat16": bf16,
            "fp16": frozenset(precision_config.DeepSpeedFP16Config.model_fields),
            "optimizer": frozenset({"type", "params", "legacy_fusion"}),
            "scheduler": frozenset({"type", "params"}),
        },
        optimizers=frozenset(torch_optimizers | set(config.DEEPSPEED_OPTIMIZERS)),
        schedulers=frozenset(schedulers | set(runtime.lr_schedules.VALID_LR_SCHEDULES)),
    )


def _fields(model: Any) -> frozenset[str]:
    aliases = {info.alias for info in model.model_fields.values() if info.alias}
    return frozenset(model.model_fields) | aliases
