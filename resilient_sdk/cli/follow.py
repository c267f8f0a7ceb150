"""Reading along with a run: a line for each thing that happens, rank 0's own output between them."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from resilient_sdk.cli.terminal import EXIT_STOPPED, say
from resilient_sdk.cli.words import Narrator, progress
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.errors import RunFailed, RunUnreachable
from resilient_sdk.runtime.run import Run
from resilient_sdk.runtime.tail import JournalTail, RankTail

POLL_S = 0.1
PROGRESS_S = 10.0


class Follower:
    """One look at a run from the first fact on, or (`from_now`) from now on."""

    def __init__(self, run: Run, *, from_now: bool = False) -> None:
        self._run = run
        self._journal = JournalTail(run.directory, from_end=from_now)
        self._output = RankTail(run.directory, 0, from_end=from_now)
        self._narrator = Narrator()
        self._progress_at = SYSTEM_CLOCK.monotonic() + PROGRESS_S
        self._step = -1

    def follow(self) -> int:
        """Returns the exit status: when the run has ended, or at Ctrl-C, which leaves it alone.

        Raises:
            RunFailed, NoStandbyLeft: the run did. RunUnreachable: all its processes were killed.
        """
        try:
            while self._run.directory.alive():
                self.catch_up()
                self._tell_progress()
                SYSTEM_CLOCK.sleep(POLL_S)
            return self._end()
        except KeyboardInterrupt:
            say_detached(self._run)
            return 0

    def catch_up(self) -> None:
        """Tells what is new."""
        for fact in self._journal.read():
            told = self._narrator.line(fact)
            if told is not None:
                say(*told)
        sys.stdout.write(self._output.read())
        sys.stdout.flush()

    def _tell_progress(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_S
        status = self._run.glance()
        if status.step != self._step:
            self._step = status.step
            say(progress(status), "dim")

    def _end(self) -> int:
        try:
            status = self._run.wait()
        except RunFailed as failure:
            self.catch_up()
            tell_traceback(failure.evidence)
            raise
        finally:
            self.catch_up()
        if not status.ended:
            raise RunUnreachable(f"all processes of run {status.run} are gone",
                                 fix=f"Go on with `resilient run --resume {status.run}`.")  # fmt: skip
        if status.state == "stopped":
            say(f"Go on with `resilient run --resume {status.run}`.")
            return EXIT_STOPPED
        return 0


def tell_traceback(error: dict[str, object]) -> None:
    """The first traceback by time, and whose it is."""
    text = str(error.get("traceback") or "")
    if text:
        say(f"The first traceback is rank {error.get('rank')}'s, at step {error.get('step')}:", "bold red")
        say(text.rstrip())


def say_detached(run: Run) -> None:
    """Says that the run goes on, and how to get at it."""
    say(f"\nDetached; run {run.id} goes on.")
    say(f"  look again: resilient attach {run.id}")
    say(f"  stop it:    resilient stop {run.id}")


@contextmanager
def held_interrupts() -> Iterator[list[int]]:
    """A Ctrl-C while a run is being started only goes into the list: never half a run."""
    pressed: list[int] = []

    def press(number: int, _frame: FrameType | None) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
