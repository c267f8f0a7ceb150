"""Who holds a run up? Pure: a stalled step against its peers, with time as data."""

from dataclasses import dataclass

from resilient_sdk.coordination.state import Phase, RunState, WorkerState

BEAT_S = 0.5
"""How often a worker's own thread says that it lives."""
SILENT_S = 3.0
"""A worker that has said nothing for so long is stopped, or holds the GIL: it cannot even leave."""
STEPS_PER_DEADLINE = 10.0
"""A step may take ten times its median before it counts as stalled."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stalled generation. `culprits` are to be killed; none: nobody can be blamed, form it again."""

    culprits: tuple[int, ...]
    cause: str


def deadline(state: RunState) -> float:
    """Seconds without progress after which the current phase counts as stalled."""
    if state.phase != Phase.STEPPING or not state.durations:
        return max(state.stall_floor_s, state.startup_s)
    return max(state.stall_floor_s, STEPS_PER_DEADLINE * state.step_seconds())


def find_stall(state: RunState, now: float) -> Stall | None:
    """The stall that stands at `now`, or None.

    The first rule that names somebody decides: the silent; then, in a step, those outside a collective while
    a peer waits in one; while forming, those who have not reported.
    """
    if state.phase not in (Phase.JOINING, Phase.RESTORING, Phase.STEPPING):
        return None
    members = state.members()
    quiet_for = now - max(state.progress_at, state.phase_since)
    if any(w.paused for w in members) or quiet_for < min(deadline(state), _silence_deadline(state)):
        return None
    silent = [w for w in members if now - max(w.beat_at, state.phase_since) > SILENT_S]
    if silent and len(silent) < len(members) and quiet_for >= _silence_deadline(state):
        return _blame(silent, f"gave no sign of life for {SILENT_S:g} s")
    if quiet_for < deadline(state):
        return None
    if state.phase == Phase.STEPPING:
        return _stalled_step(members, quiet_for)
    return _stalled_forming(state, members, quiet_for)


def _silence_deadline(state: RunState) -> float:
    # A stopped process needs no startup allowance: even a first step's main thread leaves the beat alone.
    return max(state.stall_floor_s, STEPS_PER_DEADLINE * state.step_seconds(), SILENT_S)


def _stalled_step(members: list[WorkerState], quiet_for: float) -> Stall:
    outside = [w for w in members if not w.waiting]
    if outside and len(outside) < len(members):
        return _blame(outside, f"held its peers up for {quiet_for:.1f} s")
    behind = [w for w in members if w.step < max(m.step for m in members)]
    if behind:
        return _blame(behind, f"stayed behind its peers for {quiet_for:.1f} s")
    return Stall((), f"no rank finished a step for {quiet_for:.1f} s")


def _stalled_forming(state: RunState, members: list[WorkerState], quiet_for: float) -> Stall:
    reported = {int(rank) for rank in state.offers} if state.phase == Phase.JOINING else set(state.restored)
    late = [w for w in members if w.rank not in reported]
    if late and len(late) < len(members):
        return _blame(late, f"did not report for {quiet_for:.1f} s while the generation formed")
    return Stall((), f"the generation did not form within {quiet_for:.1f} s")


def _blame(workers: list[WorkerState], what: str) -> Stall:
    names = ", ".join(f"rank {w.rank}" for w in workers)
    return Stall(tuple(w.worker for w in workers), f"{names} {what}")
