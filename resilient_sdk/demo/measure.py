"""From what two runs wrote down to what is claimed about them. Pure: values in, values out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Sequence[Mapping[str, Any]]
Losses = dict[int, list[float]]
"""By rank, the loss of each step, from step 1 on."""


@dataclass(frozen=True)
class Recovery:
    """One recovery, from the kill on; seconds.

    `phases` follow each other and add up to `seconds`; `inside` are the slowest rank's own timings within
    `reform` and `restore`. The end is when every rank has done the next step and the head names it.
    """

    seconds: float
    step: int
    steps_lost: int
    phases: dict[str, float]
    inside: dict[str, float]


def recovery(facts: Facts, killed_at: float) -> Recovery | None:
    """The recovery from a kill at wall time `killed_at`; None as long as it is not over.

    Clocks: the killer's and the controller's are one machine's.
    """
    after = [fact for fact in facts if fact["time"] >= killed_at]
    lost, promoted, formed, done = (
        _first(after, name)
        for name in ("RankLost", "StandbyPromoted", "GenerationFormed", "RecoveryFinished")
    )
    if lost is None or promoted is None or formed is None or done is None:
        return None
    committed = next((f for f in after if f["fact"] == "HeadMoved" and f["step"] >= done["step"]), None)
    if committed is None:
        return None
    loading = restoring(formed)
    marks = {
        "detect": lost["time"],
        "promote": promoted["time"],
        "reform": formed["time"] - loading,
        "restore": formed["time"],
        "step": done["time"],
        "commit": max(done["time"], committed["time"]),
    }
    phases, before = {}, killed_at
    for name, mark in marks.items():
        phases[name] = mark - before
        before = mark
    # `wait` began when the standby was ready, long before the kill.
    inside = {name: seconds for name, seconds in formed["phases"].items() if name != "wait"}
    return Recovery(before - killed_at, done["step"], formed["lost"], phases, inside)


def restoring(formed: Mapping[str, Any]) -> float:
    """Of a GenerationFormed: the seconds of reading and loading the state, the slowest rank's."""
    inside = formed["phases"]
    return float(inside.get("read", 0.0) + inside.get("restore", 0.0))


def _first(facts: Facts, name: str) -> Mapping[str, Any] | None:
    return next((fact for fact in facts if fact["fact"] == name), None)


def read_losses(text: str) -> list[float] | None:
    """One rank's losses; None if a step is missing, or ran twice and had two losses."""
    found: dict[int, float] = {}
    for line in text.splitlines():
        record = json.loads(line)
        if found.setdefault(record["step"], record["loss"]) != record["loss"]:
            return None
    return (
        [found[step] for step in sorted(found)] if sorted(found) == list(range(1, len(found) + 1)) else None
    )
