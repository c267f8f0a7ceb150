"""Who holds a run up? Pure: a stalled generation against its peers, with time as data."""

from dataclasses import dataclass

from resilient_sdk.coordination.state import Phase, Role, RunState, WorkerState

BEAT_S = 0.5
"""How often a worker's own thread says that it lives."""
SILENT_S = 3.0
"""A worker that has said nothing for so long is stopped, or holds the GIL: it cannot even leave."""
STEPS_PER_DEADLINE = 10.0
"""A step may take ten times its median before it counts as stalled."""
VERDICT_S = 0.5
"""How long a failure waits for the death of a peer to explain it."""
BLIND_S = 2.0
"""A coordinator that was not asked for so long was dead, stopped or busy itself."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall. `culprits` are to be killed; none: nobody can be blamed, form the generation again.

    With an `outcome` no new generation would help: the run ends with it.
    """

    culprits: tuple[int, ...]
    cause: str
    outcome: str = ""


def wake(state: RunState, now: float) -> None:
    """Notes that the coordinator looks. What it could not see meanwhile counts against nobody: after a
    controller's death or a slow call of the store, facts are still under way when it looks again."""
    if not 0.0 <= now - state.awake_at <= BLIND_S:  # below 0: the machine was booted again
        state.progress_at = now
        state.phase_since = min(state.phase_since, now)
        state.broken_at = min(state.broken_at, now)
        state.verdict_at = max(state.verdict_at, now + VERDICT_S)
        for worker in state.living():
            worker.beat_at = now
    state.awake_at = now


def deadline(state: RunState) -> float:
    """Seconds without progress after which the current phase counts as stalled."""
    starting = (
        state.phase != Phase.STEPPING or not state.durations or not all(w.warm for w in state.members())
    )
    if starting:
        return max(state.stall_floor_s, state.startup_s)
    return max(state.stall_floor_s, STEPS_PER_DEADLINE * state.step_seconds())


def find_stall(state: RunState, now: float) -> Stall | None:
    """The stall that stands at `now`, or None.

    The first rule that names somebody decides: the silent; then, in a step, those outside a collective while
    a peer waits in one; while forming, those who have not reported.
    """
    quiet_for = now - max(state.progress_at, state.phase_since)
    if state.phase == Phase.FORMING:
        return _stalled_start(state, quiet_for)
    if state.phase not in (Phase.JOINING, Phase.RESTORING, Phase.STEPPING):
        return None
    silent = _silent(state, now) if quiet_for >= _silence_deadline(state) else []
    if silent and any(now - w.beat_at < SILENT_S for w in state.living()):
        return _blame(silent, f"gave no sign of life for {SILENT_S:g} s")
    members = state.members()
    nobody_is_heard = len(silent) == len(members)
    if quiet_for < deadline(state) or (any(w.paused for w in members) and not nobody_is_heard):
        return None
    if nobody_is_heard:
        # It may be the connection, and what is known of who waits is old: a new generation finds out.
        return Stall((), f"no worker gave a sign of life for {quiet_for:.1f} s")
    if state.phase == Phase.STEPPING:
        return _stalled_step(state, members, quiet_for)
    return _stalled_forming(state, members, quiet_for)


def _silence_deadline(state: RunState) -> float:
    # A stopped process needs no startup allowance: even a first step's main thread leaves the beat alone.
    return max(state.stall_floor_s, STEPS_PER_DEADLINE * state.step_seconds(), SILENT_S)


def _silent(state: RunState, now: float) -> list[WorkerState]:
    """Members that said nothing though they should have."""
    members = [w for w in state.members() if w.role == Role.MEMBER]
    pause = any(w.paused for w in members)
    return [w for w in members if now - max(w.beat_at, state.phase_since) >= _patience(state, w, pause=pause)]


def _patience(state: RunState, worker: WorkerState, *, pause: bool) -> float:
    if worker.paused:
        # What it does on purpose may hold the GIL, but not for ever: a stopped one would stop the whole run.
        return max(state.stall_floor_s, state.startup_s)
    return _silence_deadline(state) if pause else SILENT_S


def _stalled_start(state: RunState, quiet_for: float) -> Stall | None:
    ordered = [w.worker for w in state.workers if w.role == Role.ORDERED]
    if not ordered or quiet_for < deadline(state):
        return None
    names = ", ".join(str(worker) for worker in ordered)
    return Stall((), f"worker {names} did not start within {quiet_for:.1f} s", "no_standby")


def _stalled_step(state: RunState, members: list[WorkerState], quiet_for: float) -> Stall:
    stepping = [w for w in members if w.rank not in state.done and w.role == Role.MEMBER]
    outside = [w for w in stepping if not w.waiting]
    if outside and len(outside) < len(members):
        return _blame(outside, f"held its peers up for {quiet_for:.1f} s")
    # Peers wait for ranks that have left the loop: a new generation would come to the same point.
    gone = [w for w in members if w.role != Role.MEMBER]
    if gone:
        return Stall((), f"{_names(gone)} returned from train() before the last step of the others", "failed")
    if len(stepping) < len(members):
        done = [w for w in members if w not in stepping]
        return Stall((), f"{_names(done)} had no step left while the others still step", "failed")
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
    return Stall(tuple(w.worker for w in workers), f"{_names(workers)} {what}")


def _names(workers: list[WorkerState]) -> str:
    return ", ".join(f"rank {w.rank}" for w in workers)
