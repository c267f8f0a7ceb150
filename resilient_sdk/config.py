"""Settings of a run, and the one door through which the environment comes in."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from resilient_sdk.errors import ConfigError

FORMAT = 1
"""Version of the run directory. A newer one is refused by name."""


class FaultSetting(BaseModel):
    """One fault of a chaos drill; see resilient_sdk.faults.Fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    point: str
    rank: int | None = None
    step: int = 0
    times: int = 1
    action: str = "kill"


class RunSettings(BaseModel):
    """What a run was asked to be. Written once, into its run directory; never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    run: str
    nproc: int = Field(ge=1)
    standbys: int = Field(default=1, ge=0)
    max_restarts: int = Field(default=100, ge=0)
    seed: int = 0
    stall_floor_s: float = Field(default=30.0, gt=0)
    startup_s: float = Field(default=600.0, gt=0)
    store: str
    store_budget_bytes: int = Field(default=8 << 30, gt=0)
    memory: str
    script: str | None = None
    module: bool = False
    arguments: tuple[str, ...] = ()
    cwd: str
    path: tuple[str, ...] = ()
    faults: tuple[FaultSetting, ...] = ()


def settings_from(**values: object) -> RunSettings:
    """Validated settings.

    Raises:
        ConfigError: names the setting, what it was and what it may be, in one line.
    """
    try:
        return RunSettings(**values)  # type: ignore[arg-type]
    except ValueError as problem:
        raise ConfigError(_one_line(problem), fix="See `resilient run --help`.") from problem


def _one_line(problem: ValueError) -> str:
    errors = getattr(problem, "errors", None)
    if errors is None:
        return str(problem)
    first = errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    return f"{name} = {first.get('input')!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def home() -> Path:
    """Where runs are kept: $RESILIENT_HOME, else ~/.local/state/resilient."""
    chosen = os.environ.get("RESILIENT_HOME")
    return Path(chosen) if chosen else Path.home() / ".local" / "state" / "resilient"


def memory_root() -> Path:
    """Where snapshots live: $RESILIENT_MEMORY, else /dev/shm. It must be memory: every step writes there."""
    return Path(os.environ.get("RESILIENT_MEMORY", "/dev/shm"))  # noqa: S108  # shared memory, in a 0700 directory


def hide_gpus() -> None:
    """From now on this process and its children see no CUDA device."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def child_environment() -> dict[str, str]:
    """The environment that a run's processes get: ours, with one thread a process where nobody chose.

    Several ranks share the cores of one machine; each starting a thread a core makes all of them slow.
    """
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    # Large tensors in large pages, where the kernel has them: a rebuilt engine touches all its memory at once, and
    # a killed one gives all of it back before its death is seen. That was a tenth of a recovery.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
