"""What is true of a run's state after every fact. Tests ask after each event."""

from collections.abc import Iterator

from resilient_sdk.coordination.state import Phase, Role, RunState
from resilient_sdk.errors import InvalidTransition


def validate(state: RunState) -> None:
    """Checks all invariants.

    Raises:
        InvalidTransition: one does not hold; the evidence is the state.
    """
    for check in (_ownership, _phase, _forming, _formed, _stepping, _budgets):
        for broken in check(state):
            raise InvalidTransition(f"the coordinator's state is broken: {broken}", state=state.record())


def _ownership(s: RunState) -> Iterator[str]:
    owners = [worker for worker in s.owners if worker is not None]
    if not len(s.owners) == len(s.history) == s.nproc:
        yield f"{len(s.owners)} ranks and {len(s.history)} histories in a world of {s.nproc}"
    if [w.worker for w in s.workers] != list(range(len(s.workers))):
        yield "workers are not numbered by their place"
    if len(set(owners)) != len(owners):
        yield f"a worker owns two ranks: {s.owners}"
    for rank, number in enumerate(s.owners):
        if number is not None and s.workers[number].rank != rank:
            yield f"worker {number} does not know that it owns rank {rank}"
    for worker in s.workers:
        if worker.role == Role.MEMBER and worker.worker not in owners:
            yield f"worker {worker.worker} is a member and owns no rank"


def _phase(s: RunState) -> Iterator[str]:
    if (s.phase == Phase.ENDED) != bool(s.outcome):
        yield f"outcome {s.outcome!r} in phase {s.phase}"
    if s.phase in (Phase.FORMING, Phase.ENDED):
        return
    if s.vacancies():
        yield f"ranks {s.vacancies()} have no owner in phase {s.phase}"
    if s.phase != Phase.FINISHING and any(w.role == Role.FRESH for w in s.workers):
        yield "a fresh worker was told nothing"
    may_be_gone = s.phase in (Phase.STEPPING, Phase.FINISHING)
    for worker in s.members():
        if worker.role != Role.MEMBER and not (may_be_gone and worker.role == Role.GONE):
            yield f"worker {worker.worker} owns rank {worker.rank} and is {worker.role}"


def _forming(s: RunState) -> Iterator[str]:
    if s.phase != Phase.FORMING or s.nproc == 0:
        return
    coming = sum(w.role == Role.ORDERED for w in s.workers)
    if len(s.candidates()) >= len(s.vacancies()):
        yield f"ranks {s.vacancies()} are vacant though {len(s.candidates())} workers wait"
    if len(s.candidates()) + coming < len(s.vacancies()):
        yield f"ranks {s.vacancies()} wait for workers that nobody has ordered"
    if s.pending:
        yield "failures of a generation that is over wait for a verdict"


def _formed(s: RunState) -> Iterator[str]:
    ranks = set(range(s.nproc))
    if s.phase == Phase.JOINING and (len(s.offers) >= s.nproc or s.restored or s.done):
        yield "a generation that joins is further than that"
    if s.phase == Phase.RESTORING:
        if {int(rank) for rank in s.offers} != ranks or len(s.restored) >= s.nproc:
            yield f"offers of {sorted(s.offers)}, restored {s.restored} while restoring"
        if not s.scratch and any(s.restore_step not in steps for steps in s.offers.values()):
            yield f"step {s.restore_step} is not common"
        if s.scratch and s.restores:
            yield "members built for a snapshot are to start from scratch"


def _stepping(s: RunState) -> Iterator[str]:
    if s.phase in (Phase.STEPPING, Phase.FINISHING):
        if set(s.restored) != set(range(s.nproc)) or s.target <= s.restore_step:
            yield f"restored {s.restored}, stored {sorted(s.stored)} of step {s.target}"
        if len(s.stored) >= s.nproc and s.target < s.best:
            yield f"step {s.target} is stored, step {s.best} was finished, and no rank was told to store more"
        if s.best != min(w.finished for w in s.members()):
            yield f"step {s.best} is said to be finished by all"
    if (s.phase == Phase.FINISHING) != (len(s.done) == s.nproc > 0) and s.phase != Phase.ENDED:
        yield f"ranks {s.done} are done in phase {s.phase}"
    if len({failure["worker"] for failure in s.pending}) != len(s.pending) or len(s.pending) > s.nproc:
        yield "a worker failed twice in a generation"


def _budgets(s: RunState) -> Iterator[str]:
    if not 0 <= s.owed <= s.restarts <= s.max_restarts:
        yield f"{s.owed} owed of {s.restarts} restarts, {s.max_restarts} allowed"
    if s.is_calm() and s.owed:
        yield f"{s.owed} workers are owed though no recovery is under way"
    if s.head < -1 or s.best < 0 or s.generation < 0:
        yield f"head {s.head}, best {s.best}, generation {s.generation}"
