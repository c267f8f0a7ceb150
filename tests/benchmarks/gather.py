"""Writes BENCHMARKS.md from the JSON that the benchmarks wrote.

python tests/benchmarks/gather.py FILE.json...
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.report import bar_text, describe

PAGE = Path(__file__).resolve().parents[2] / "BENCHMARKS.md"
HEAD = """# Benchmarks

`make bench` runs them all and writes this page. Each runs both sides on one machine. Figures are medians with
minimum and maximum; a bar that does not hold is listed like the others.
"""


def page(records: list[dict[str, Any]]) -> str:
    """The whole page, the benchmarks in the order of the records."""
    return "\n".join([HEAD, _all_bars(records), *(_section(record) for record in records)])


def _all_bars(records: list[dict[str, Any]]) -> str:
    lines = ["| bar | holds |", "|---|---|"]
    lines += [
        f"| {record['benchmark']}: {bar_text(bar)} | {'yes' if bar['holds'] else '**no**'} |"
        for record in records
        for bar in record["bars"]
    ]
    return "\n".join(lines) + "\n"


def _section(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"## {record['benchmark']}",
        "",
        f"{record['date']}, {describe(record['machine'])}; {versions}; {record['repetitions']} repetitions.",
        "",
        f"    {record['command']}",
        "",
        "| figure | unit | median | min | max | n |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in record["results"].items():
        values = " | ".join(f"{found[key]:.4g}" for key in ("median", "min", "max"))
        lines.append(f"| {name} | {found['unit']} | {values} | {found['n']} |")
    lines += ["", *(f"- {note}" for note in record["notes"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    records = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    if not records:
        raise SystemExit("usage: gather.py FILE.json...")
    PAGE.write_text(page(records))
    print(f"{PAGE.name}: {len(records)} benchmarks")


if __name__ == "__main__":
    main()
