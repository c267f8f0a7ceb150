"""One turn of the coordinator: the state, the time, and what was ordered so far. Every rule works on one."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from resilient_sdk.coordination.commands import Announce, Command, EndRun, Unwind
from resilient_sdk.coordination.state import Phase, Role, RunState, WorkerState
from resilient_sdk.errors import InvalidTransition
from resilient_sdk.events import Fact, RunEnded

FORMED = (Phase.JOINING, Phase.RESTORING, Phase.STEPPING)
"""Every rank has an owner, and a fault makes the next generation."""
GRACE_S = 10.0
"""What workers get to leave the user's code at the end of a run before they are killed."""


class OfGeneration(Protocol):
    """A fact that a member reports for its generation."""

    @property
    def worker(self) -> int: ...
    @property
    def generation(self) -> int: ...


@dataclass(slots=True)
class Turn:
    """One fact, or one tick. `out` is what is to be done, in order."""

    state: RunState
    now: float
    out: list[Command] = field(default_factory=list)

    def order(self, *commands: Command) -> None:
        self.out += commands

    def repeat(self, command: Command) -> None:
        """Orders what was ordered before, unless this very turn did."""
        if command not in self.out:
            self.out.append(command)

    def announce(self, fact: Fact) -> None:
        self.out.append(Announce(fact))

    def worker(self, number: int) -> WorkerState:
        """Worker `number`.

        Raises:
            InvalidTransition: it was never ordered: the fact is of another run or version.
        """
        if not 0 <= number < len(self.state.workers):
            raise InvalidTransition(f"there is no worker {number}", workers=len(self.state.workers))
        return self.state.workers[number]

    def speaker(self, fact: OfGeneration, *phases: Phase) -> WorkerState | None:
        """The member that `fact` comes from; None, and not heard, if it is late, dead or out of turn."""
        found = self.worker(fact.worker)
        current = fact.generation == self.state.generation and self.state.phase in phases
        return found if current and found.role == Role.MEMBER else None

    def enter(self, phase: Phase) -> None:
        self.state.phase, self.state.phase_since = phase, self.now

    def end(self, outcome: str, message: str, error: dict[str, Any] | None = None) -> None:
        """Ends the run: the first reason stays."""
        s = self.state
        if s.phase == Phase.ENDED:
            raise InvalidTransition(f"the run had ended ({s.outcome})", again=outcome, message=message)
        s.outcome, s.message, s.error = outcome, message, error or {}
        self.enter(Phase.ENDED)
        for worker in s.living():
            self.order(Unwind(worker.worker, message))
        self.announce(RunEnded(outcome, message, s.error))
        self.order(EndRun(outcome, message, s.error, GRACE_S))
