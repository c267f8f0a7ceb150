"""What every benchmark reports: the machine, figures with their spread, bars; as a table and as JSON.

    {"benchmark", "machine", "versions", "command", "date", "repetitions", "results", "bars"}

A bar that does not hold is reported like any other and fails nothing.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

REPETITIONS = 5


@dataclass(frozen=True)
class Spread:
    """Of one figure, measured `n` times."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("nothing was measured")
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Bar:
    """What a figure has to be: at most (`lower` is better) or at least (`higher`) its limit."""

    name: str
    value: float
    unit: str
    limit: float
    better: Literal["lower", "higher"]

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@dataclass
class Report:
    """One benchmark's run. Figures are added as they come; `finish` prints and writes them."""

    benchmark: str
    repetitions: int
    figures: dict[str, tuple[Spread, str]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load_before: str = field(default_factory=lambda: _load())

    def figure(self, name: str, values: Sequence[float], unit: str = "s") -> Spread:
        """Adds a figure; returns its spread."""
        spread = Spread.of(values)
        self.figures[name] = (spread, unit)
        return spread

    def bar(
        self, name: str, value: float, unit: str, limit: float, better: Literal["lower", "higher"]
    ) -> None:
        self.bars.append(Bar(name, value, unit, limit, better))

    def note(self, text: str) -> None:
        """Something a reader has to know: how it was measured, or what went wrong."""
        self.notes.append(text)

    def record(self) -> dict[str, Any]:
        """The JSON."""
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": " ".join(_command()),
            "machine": {**machine(), "load_before": self.load_before, "load_after": _load()},
            "versions": versions(),
            "repetitions": self.repetitions,
            "results": {name: {**asdict(s), "unit": unit} for name, (s, unit) in self.figures.items()},
            "bars": [bar.record() for bar in self.bars],
            "notes": list(self.notes),
        }

    def finish(self, path: Path | None) -> None:
        record = self.record()
        print(text(record))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")


def text(record: dict[str, Any]) -> str:
    """A record as it is printed, and as BENCHMARKS.md shows it."""
    lines = [
        f"{record['benchmark']}: {record['repetitions']} repetitions, {describe(record['machine'])}",
        f"{'':<44} {'median':>10} {'min':>10} {'max':>10}  n",
    ]
    for name, found in record["results"].items():
        values = " ".join(f"{found[key]:>10.4g}" for key in ("median", "min", "max"))
        lines.append(f"{name + ' [' + found['unit'] + ']':<44} {values}  {found['n']}")
    lines += [
        ("holds          " if bar["holds"] else "DOES NOT HOLD  ") + bar_text(bar) for bar in record["bars"]
    ]
    lines += [f"note: {note}" for note in record["notes"]]
    return "\n".join(lines)


def bar_text(bar: dict[str, Any]) -> str:
    sign = "<=" if bar["better"] == "lower" else ">="
    return f"{bar['name']}: {bar['value']:.3g} {bar['unit']}, wanted {sign} {bar['limit']:.3g}"


def machine() -> dict[str, Any]:
    """Where it was measured; nothing that names the host."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def describe(found: dict[str, Any]) -> str:
    return (
        f"{found['cores']} cores ({found['processor']}), {found['memory_gib']} GiB, {found['system']}, "
        f"load {found['load_before']} before and {found['load_after']} after"
    )


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "deepspeed")}}


def arguments(about: str) -> argparse.Namespace:
    """The command line that all have: `quick`, `json`, and `repetitions` that follows from them."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="one repetition: does it work at all?")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the record there")
    found = parser.parse_args()
    found.repetitions = 1 if found.quick else REPETITIONS
    return found


def _command() -> list[str]:
    # Without the place of the file: a reader runs it from the repository's root.
    script = Path(sys.argv[0])
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--json":
            next(words, None)
        elif not word.startswith("--json="):
            kept.append(word)
    return ["python", str(Path(*script.parts[-3:])), *kept]


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
