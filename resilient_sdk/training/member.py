"""A worker's side of the protocol: facts up, commands down, and the thread that never blocks.

That thread hears of a broken generation while the main thread is stuck in a collective, and gets it out.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.coordination.commands import (
    Command,
    Join,
    Leave,
    NoteHead,
    Release,
    StoreSnapshot,
    Unwind,
    command_from,
)
from resilient_sdk.coordination.stall import BEAT_S
from resilient_sdk.events import Beat, Fact
from resilient_sdk.faults import FaultPlan
from resilient_sdk.ids import Step
from resilient_sdk.rpc.frames import Channel, ChannelClosed
from resilient_sdk.training.blame import in_collective
from resilient_sdk.training.group import Group

LEAVE_S = 5.0
"""What a main thread gets to leave a broken generation; then its process exits and another takes the rank."""
EXIT_LEFT = 75
"""Exit status: a peer's death threw this worker out of the user's code (EX_TEMPFAIL)."""
EXIT_ORPHANED = 76
"""Exit status: the agent is gone."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker is told at its birth."""

    worker: int
    run: str
    nproc: int
    seed: int
    store: str
    store_budget_bytes: int
    memory: Path
    rendezvous: Path
    signing_key: bytes
    faults: FaultPlan


class Uploads(Protocol):
    """The part of an uploader that the coordinator steers."""

    def store(self, step: Step) -> None: ...

    def head_moved(self, step: Step) -> None: ...


class GenerationOver(Exception):
    """This generation broke while it was being formed."""


class Unwound(BaseException):
    """The run ends, or this worker is not needed. Not an Exception: the user's code must not catch it."""

    def __init__(self, reason: str, *, released: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.released = released


class Member:
    """One worker as a member of its run.

    `newest` is the newest generation this worker was told to join; 0 before any. The main thread may still act
    for an older one, and says so in its facts.
    """

    def __init__(self, channel: Channel, context: WorkerContext, exit_process: Callable[[int], None]) -> None:
        self.context = context
        self.newest = 0
        self.step = 0
        self.uploads: Uploads | None = None
        self._channel = channel
        self._exit = exit_process
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._group: Group | None = None
        self._group_generation = 0
        self._lock = threading.Lock()
        self._leave_by: float | None = None
        self._alive_from = 0  # older generations are broken
        self._closing = False
        self._unwind: str | None = None
        self._last_join: Join | None = None
        self._report_again: list[Fact] = []
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._listen, name="member", daemon=True)
        self._thread.start()

    # ---- the main thread ----

    def tell(self, fact: Fact) -> None:
        """Sends a fact up."""
        try:
            self._channel.send(fact.record())
        except ChannelClosed:
            self._exit(EXIT_ORPHANED)

    def answer(self, fact: Fact) -> None:
        """Sends a fact up, and again whenever the order that it answers is repeated."""
        self._report_again.append(fact)
        self.tell(fact)

    def await_order(self, *kinds: type[Command], timeout_s: float | None = None) -> Command | None:
        """The next order of one of `kinds`; earlier ones of other kinds are dropped. None when time is up.

        Raises:
            Unwound: the run ends or this worker is released.
        """
        deadline = None if timeout_s is None else SYSTEM_CLOCK.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            try:
                order = self._inbox.get(timeout=left)
            except queue.Empty:
                return None
            if isinstance(order, Unwind):
                raise Unwound(order.reason, released=False)
            if isinstance(order, Release):
                raise Unwound("not needed any more", released=True)
            if isinstance(order, kinds):
                return order

    def await_join(self) -> Join:
        """The next rank to own. Older generations' orders are passed over."""
        while True:
            order = self.await_order(Join)
            assert isinstance(order, Join)
            if order.generation == self.newest:
                return order

    def await_of_generation(self, generation: int, *kinds: type[Command]) -> Command:
        """The next order of `kinds` for `generation`.

        Raises:
            GenerationOver: a newer generation was announced, or this one broke.
        """
        while True:
            order = self.await_order(*kinds, Leave, Join)
            assert order is not None
            if isinstance(order, Join) and order.generation > generation:
                self._inbox.put(order)
                raise GenerationOver
            if getattr(order, "generation", 0) == generation:
                if isinstance(order, Leave):
                    raise GenerationOver
                if isinstance(order, kinds):
                    return order

    def await_verdict(self, generation: int) -> None:
        """Waits until `generation` is over: this worker has reported that it cannot go on in it.

        Raises:
            Unwound: the run ends.
        """
        with contextlib.suppress(GenerationOver):
            self.await_of_generation(generation)

    def is_over(self, generation: int) -> bool:
        """Whether `generation` is known to be broken. For polling from the main thread."""
        with self._lock:
            return generation < self._alive_from

    def check(self, generation: int) -> None:
        """Between steps: no collective would tell a rank that is alone, or not for long.

        Raises:
            Unwound: the run ends. GenerationOver: `generation` is known to be broken.
        """
        if self._unwind is not None:
            raise Unwound(self._unwind, released=False)
        if self.is_over(generation):
            raise GenerationOver

    def entered(self, group: Group, generation: int) -> None:
        """From now on a broken generation aborts `group`."""
        with self._lock:
            self._group, self._group_generation = group, generation
            stale = generation < self._alive_from
        if stale:
            group.abort()

    def left(self) -> None:
        """The main thread is out of every collective."""
        with self._lock:
            self._group, self._leave_by = None, None

    def forget_answers(self) -> None:
        """What was answered so far belongs to a generation that is over."""
        self._report_again = []

    def close(self) -> None:
        """Ends the listening thread and closes the channel."""
        self._closing = True
        self._thread.join()
        self._channel.close()

    # ---- the listening thread ----

    def _listen(self) -> None:
        beat_due = 0.0
        while not self._closing:
            now = SYSTEM_CLOCK.monotonic()
            if now >= beat_due:
                self._beat()
                beat_due = now + BEAT_S
            self._check_leaving(now)
            try:
                record = self._channel.receive(timeout_s=max(0.0, min(beat_due - now, 0.1)))
            except ChannelClosed:
                self._exit(EXIT_ORPHANED)
                return
            if record is not None:
                self._hear(command_from(record))

    def _beat(self) -> None:
        self.tell(Beat(self.context.worker, self.newest, self.step, in_collective(self._main)))

    def _check_leaving(self, now: float) -> None:
        """A main thread that cannot be freed (a rendezvous, a user's own blocking call) must not hold the others."""
        with self._lock:
            late = self._leave_by is not None and now > self._leave_by
        # Long computation of the user's is not stuck: it will meet the broken group by itself.
        if late and in_collective(self._main):
            print(
                f"worker {self.context.worker}: could not leave generation {self._group_generation}",
                flush=True,
            )
            self._exit(EXIT_LEFT)

    def _hear(self, order: Command) -> None:
        if isinstance(order, StoreSnapshot):
            if self.uploads is not None:
                self.uploads.store(Step(order.step))
        elif isinstance(order, NoteHead):
            if self.uploads is not None:
                self.uploads.head_moved(Step(order.step))
        elif isinstance(order, Join | Leave):
            self._hear_generation(order)
        else:
            self._inbox.put(order)
            if isinstance(order, Unwind):
                self._unwind = order.reason
                self._abort_older(self.newest + 1)

    def _hear_generation(self, order: Join | Leave) -> None:
        if isinstance(order, Join):
            if order == self._last_join:
                # Repeated by a controller that came back: what was answered may have been lost.
                for fact in list(self._report_again):
                    self.tell(fact)
                return
            self._last_join = order
            self.newest = max(self.newest, order.generation)
            self._inbox.put(order)
            self._abort_older(order.generation)
        else:
            self._inbox.put(order)
            self._abort_older(order.generation + 1)

    def _abort_older(self, generation: int) -> None:
        with self._lock:
            self._alive_from = max(self._alive_from, generation)
            group = self._group if self._group_generation < generation else None
            if group is not None and self._leave_by is None:
                self._leave_by = SYSTEM_CLOCK.monotonic() + LEAVE_S
        if group is not None:
            group.abort()
