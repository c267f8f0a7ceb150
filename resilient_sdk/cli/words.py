"""Facts and states in a line of plain words."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from resilient_sdk.runtime.run import Status

_STYLES = {
    "RankLost": "red",
    "GenerationBroken": "red",
    "StandbyPromoted": "yellow",
    "GenerationFormed": "cyan",
    "RecoveryFinished": "green",
    "StandbyReady": "green",
}
_OUTCOME_STYLES = {"finished": "bold green", "failed": "bold red", "no_standby": "bold red"}


class Narrator:
    """Turns a run's journal into lines. Facts that say nothing new to a person have none."""

    def __init__(self) -> None:
        self._told = ""

    def line(self, fact: Mapping[str, Any]) -> tuple[str, str] | None:
        """(text, style) of a journal's fact, or None."""
        name = fact["fact"]
        teller = _TELLERS.get(name)
        text = teller(fact) if teller is not None else ""
        # A lost rank breaks its generation with the same words.
        if not text or (name == "GenerationBroken" and fact["cause"] == self._told):
            return None
        if name == "RankLost":
            self._told = f"rank {fact['rank']} {fact['cause']}"
        style = _OUTCOME_STYLES.get(fact["outcome"], "bold") if name == "RunEnded" else _STYLES.get(name, "")
        return f"{clock_time(fact['time'])}  {text}", style


def clock_time(seconds: float) -> str:
    """The local time of day."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """As a person would say it: 85 ms, 1.65 s, 3 min, 2 h, 5 days."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, size in (("min", 60), ("h", 3600), ("days", 86400)):
        if seconds < 120 * size or unit == "days":
            return f"{seconds / size:.0f} {unit}"
    raise AssertionError("days take everything")


def count(number: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def phases(values: Mapping[str, float]) -> str:
    """` (leave 12 ms, form 20 ms)`, or nothing."""
    # `wait` began when the standby was ready: its own time, not the recovery's.
    inner = ", ".join(f"{name} {duration(seconds)}" for name, seconds in values.items() if name != "wait")
    return f" ({inner})" if inner else ""


def progress(status: Status) -> str:
    """Where a run stands, in one line."""
    parts = [f"step {status.step}" if status.state == "running" else f"{status.state}, step {status.step}"]
    if status.committed is not None:
        parts.append(f"{status.committed} committed")
    if status.step_s:
        parts.append(f"{duration(status.step_s)} a step")
    parts.append(f"{count(status.standbys_ready, 'standby')} ready")
    parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
    return ", ".join(parts)


def _formed(fact: Mapping[str, Any]) -> str:
    again = f", {count(fact['lost'], 'step')} to run again" if fact["lost"] else ""
    ranks = count(len(fact["workers"]), "rank")
    return f"generation {fact['generation']}: {ranks} at step {fact['step']}{again}{phases(fact['phases'])}"


def _ended_badly(fact: Mapping[str, Any]) -> str:
    if fact["signal"] is not None:
        return f"worker {fact['worker']} was killed by signal {fact['signal']}"
    return f"worker {fact['worker']} exited with status {fact['code']}" if fact["code"] else ""


_TELLERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "RunStarted": lambda f: f"run started: {count(f['nproc'], 'rank')}, {f['standbys']} on standby",
    "RunResumed": lambda f: "run resumed",  # noqa: ARG005
    "StopRequested": lambda f: f"stop: {f['reason']}",
    "RunEnded": lambda f: f["message"] or f["outcome"],
    "AgentJoined": lambda f: f"agent joined with {count(len(f['workers']), 'worker')}",
    "WorkerStarted": lambda f: f"worker {f['worker']} started, pid {f['pid']}",
    "WorkerExited": _ended_badly,
    "StartFailed": lambda f: f"workers cannot be started: {f['reason']}",
    "RestoreFailed": lambda f: f"step {f['step']} is not restored: {f['reason']}",
    "UploadMissed": lambda f: f"step {f['step']} is not stored: {f['reason']}",
    "StandbyReady": lambda f: (
        f"worker {f['worker']} stands by, warm"
        if f["warm"]
        else f"worker {f['worker']} stands by, cold: {f['note']}"
    ),
    "RankLost": lambda f: f"rank {f['rank']} is lost: it {f['cause']}",
    "GenerationBroken": lambda f: f"generation {f['generation']} broke: {f['cause']}",
    "StandbyPromoted": lambda f: (
        f"worker {f['worker']} takes rank {f['rank']}" + ("" if f["warm"] else ", cold")
    ),
    "GenerationFormed": _formed,
    "RecoveryFinished": lambda f: (
        f"recovered: step {f['step']} done {duration(f['seconds'])} after the fault was seen"
    ),
}
