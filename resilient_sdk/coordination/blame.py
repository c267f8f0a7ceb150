"""Deaths, exceptions and stalls: which is a fault to recover from, and which is the user's own failure."""

from typing import Any

from resilient_sdk.coordination.commands import KillWorker
from resilient_sdk.coordination.membership import break_generation, fill, vacate
from resilient_sdk.coordination.stall import VERDICT_S, Stall
from resilient_sdk.coordination.state import Phase, RunState, WorkerState
from resilient_sdk.coordination.turn import FORMED, Turn
from resilient_sdk.events import RankLost, StepFailed, TrainFailed, WorkerExited

MAX_RETRIES_IN_ROW = 3
"""Generations that broke without a death and without a step between them before the run is given up."""
FAILURES_KEPT = 32
LEFT = 75
"""Exit status (EX_TEMPFAIL) of a worker that a peer's death threw out of the user's code: not its doing."""

Failure = dict[str, Any]


# ---- deaths ----


def ranks_lost(turn: Turn, deaths: list[tuple[WorkerState, WorkerExited]]) -> None:
    """All that died at one moment are one fault: no generation forms with a dead member in it."""
    s = turn.state
    causes = []
    for worker, fact in deaths:
        how = worker.blamed or describe(fact)
        causes.append(f"rank {worker.rank} {how}")
        vacate(turn, worker)
        s.deaths_in_row += 1
        turn.announce(RankLost(s.generation, worker.place, worker.worker, how))
    own = [_exit_failure(worker, fact) for worker, fact in deaths if _is_own_exit(worker, fact)]
    repeated = [failure for failure in own if _seen_before(s, failure)]
    _remember(s, own)
    if repeated:
        first = repeated[0]
        turn.end("failed", f"rank {first['rank']} {first['message']} at step {first['step']}, twice", first)
    elif s.deaths_in_row >= max(6, 2 * s.nproc):
        message = f"{s.deaths_in_row} ranks died in a row without a finished step"
        turn.end("failed", message, {"rank": deaths[-1][0].rank, "kind": causes[-1]})
    elif s.phase == Phase.FORMING:
        fill(turn)
    else:
        break_generation(turn, "; ".join(causes))


def describe(fact: WorkerExited) -> str:
    if fact.signal is not None:
        return f"was killed by signal {fact.signal}"
    if fact.code is None:
        return "vanished"
    return f"exited with status {fact.code}"


def _is_own_exit(worker: WorkerState, fact: WorkerExited) -> bool:
    return fact.code is not None and fact.code != LEFT and not (worker.returned and fact.code == 0)


def _exit_failure(worker: WorkerState, fact: WorkerExited) -> Failure:
    return {
        "kind": "exit", "message": describe(fact), "rank": worker.rank, "step": worker.step,
        "generation": worker.acting, "at": fact.at, "traceback": "",
    }  # fmt: skip


# ---- exceptions ----


def step_failed(turn: Turn, fact: StepFailed) -> None:
    worker = turn.speaker(fact, *FORMED)
    if worker is not None:
        _suspect(turn, worker, fact.record(), fact.step)


def train_failed(turn: Turn, fact: TrainFailed) -> None:
    """Outside a step nothing can be undone: unless a death explains it, once is enough."""
    worker = turn.speaker(fact, *FORMED, Phase.FINISHING)
    if worker is None:
        return
    record = {**fact.record(), "collective": False, "fatal": True}
    if turn.state.phase == Phase.FINISHING:
        _fail(turn, {**record, "rank": worker.rank, "step": worker.step})
    else:
        _suspect(turn, worker, record, worker.step)


def _suspect(turn: Turn, worker: WorkerState, record: Failure, step: int) -> None:
    s = turn.state
    if any(failure["worker"] == worker.worker for failure in s.pending):
        return
    if not s.pending:
        s.verdict_at = turn.now + VERDICT_S
    s.pending.append({**record, "rank": worker.rank, "step": step})
    if len(s.pending) == s.nproc:
        judge(turn)


def judge(turn: Turn) -> None:
    """No death explains the failures: the user's code failed, or a collective did."""
    s = turn.state
    own = [f for f in s.pending if not f["collective"]]
    first = _earliest(own or s.pending)
    repeated = [f for f in own if _seen_before(s, f)]
    _remember(s, own)
    s.retries_in_row += 1
    if repeated:
        _fail(turn, _earliest(repeated))
    elif first.get("fatal") or s.retries_in_row > MAX_RETRIES_IN_ROW:
        _fail(turn, first)
    else:
        break_generation(turn, f"rank {first['rank']} raised {first['kind']} at step {first['step']}")


def _fail(turn: Turn, failure: Failure) -> None:
    """Ends the run with the first traceback of what failed, by time and rank: later ones are its echoes."""
    alike = [
        f for f in turn.state.first_failures if f["kind"] == failure["kind"] and f["step"] == failure["step"]
    ]
    first = _earliest([*alike, failure])
    where = f"rank {first['rank']} at step {first['step']}"
    turn.end("failed", f"{first['kind']} on {where}: {first['message']}", first)


def _earliest(failures: list[Failure]) -> Failure:
    return min(failures, key=lambda f: (float(f["at"]), int(f["rank"])))


def _seen_before(state: RunState, failure: Failure) -> bool:
    """In an older generation: ranks that fail alike at one moment are one failure, not two."""
    return any(
        all(earlier[name] == failure[name] for name in ("kind", "message", "step"))
        and earlier["generation"] < failure["generation"]
        for earlier in state.first_failures
    )


def _remember(state: RunState, failures: list[Failure]) -> None:
    new = [failure for failure in failures if not _seen_before(state, failure)]
    state.first_failures = [*state.first_failures, *new][-FAILURES_KEPT:]


# ---- stalls ----


def act_on_stall(turn: Turn, stall: Stall) -> None:
    s = turn.state
    if stall.outcome:
        turn.end(stall.outcome, stall.cause, {"kind": "Stalled"} if stall.outcome == "failed" else {})
        return
    for worker in stall.culprits:
        s.workers[worker].blamed = stall.cause
        turn.order(KillWorker(worker))
    if stall.culprits:
        # Their deaths will be reported; until then nobody else is blamed.
        s.progress_at = turn.now
        return
    s.retries_in_row += 1
    if s.retries_in_row > MAX_RETRIES_IN_ROW:
        turn.end("failed", stall.cause, {"kind": "Stalled"})
    else:
        break_generation(turn, stall.cause)
