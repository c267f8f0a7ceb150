"""The controller: the coordinator's hands. It feeds facts to the pure machine and does what comes out.

Detached from whoever launched the run. What it must remember is in state.json, written before anything is
ordered, so that the next controller goes on where a killed one stood. It never imports torch: it is back in
half a second.
"""

import contextlib
import fcntl
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from resilient_sdk.checkpoint.drain import commit_from_memory
from resilient_sdk.checkpoint.head import Head, move_head, read_head
from resilient_sdk.checkpoint.manifest import parse_ref
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.coordination.commands import WORKER_COMMANDS, Announce, Command, EndRun, Join, MoveHead
from resilient_sdk.coordination.machine import Coordinator
from resilient_sdk.coordination.state import Phase, RunState
from resilient_sdk.errors import ResilientError
from resilient_sdk.events import (
    Beat,
    Fact,
    HeadMoved,
    RestoreFailed,
    RunResumed,
    RunStarted,
    StepBegun,
    StepFinished,
    StopRequested,
    UploadMissed,
    fact_from,
)
from resilient_sdk.ids import Generation, Step
from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.rpc.channels import Server
from resilient_sdk.runtime.agent import SHUTDOWN
from resilient_sdk.runtime.detached import detach, start_detached
from resilient_sdk.runtime.rundir import RunDirectory
from resilient_sdk.store.address import open_store
from resilient_sdk.store.base import Store

TICK_S = 0.1
AGENT_POLL_S = 1.0
_NOT_COMMITTED = "; its newest state was not committed: "
FLEETING = (Beat, StepBegun, StepFinished)
"""Facts that come many times a second and change nothing that a new controller has to know."""


_Down = queue.SimpleQueue[pb.CommandDown | None]
"""What goes down one agent's stream; None ends it."""
_Receipt = tuple[_Down, int] | None
"""Which stream waits for which number's acknowledgement: another agent counts its own facts."""


class Controller:
    """One run's controller on this machine. `run` returns when the run has ended."""

    def __init__(self, directory: RunDirectory, *, resume: bool) -> None:
        self._directory = directory
        self._settings = directory.settings()
        record = directory.read("state.json")
        self._new = record is None
        self._resume = resume and not self._new
        self._coordinator = Coordinator(RunState.load(record) if record is not None else None)
        self._facts: queue.SimpleQueue[tuple[Fact, _Receipt]] = queue.SimpleQueue()
        self._down: _Down = queue.SimpleQueue()
        self._shutdown: pb.CommandDown | None = None  # the last order, for an agent that comes late, too
        self._journal = open(directory.journal, "a", encoding="utf-8", opener=_private)  # noqa: SIM115  # closed in run
        self._store: Store | None = None
        self._refused = False  # the store's last answer was no
        self._lock = threading.Lock()  # the state is read by those who ask while facts change it
        self._ended: EndRun | None = None
        self._agent_checked = 0.0
        self._ticked = 0.0

    def run(self) -> None:
        server = Server(self, self._directory.token())
        try:
            self._directory.note_process("controller", address=server.address)
            self._take(self._first_fact(), None)
            self._learn_head()
            if self._coordinator.state.phase == Phase.ENDED:
                self._ended = self._unfinished_end()
            while self._ended is None:
                self._watch_agent()
                self._turn()
            self._end(self._ended)
        finally:
            self._down.put(None)
            server.close()
            self._journal.close()

    def _first_fact(self) -> Fact | None:
        s = self._settings
        if self._new:
            return RunStarted(s.nproc, s.standbys, s.max_restarts, s.stall_floor_s, s.startup_s)
        return RunResumed() if self._resume else None

    def _unfinished_end(self) -> EndRun:
        # The controller before this one was killed between the decision and its last act.
        s = self._coordinator.state
        return EndRun(s.outcome, s.message, s.error, 0.0)

    # ---- facts in, commands out ----

    def _turn(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        try:
            fact, receipt = self._facts.get(timeout=TICK_S)
        except queue.Empty:
            pass
        else:
            self._take(fact, receipt)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            with self._lock:
                commands = self._coordinator.tick(SYSTEM_CLOCK.monotonic())
            if commands:
                self._remember(commands)
            self._perform(commands)

    def _take(self, fact: Fact | None, receipt: _Receipt) -> None:
        if fact is not None:
            with self._lock:
                commands = self._coordinator.handle(fact, SYSTEM_CLOCK.monotonic())
            self._note(fact)
            if commands or not isinstance(fact, FLEETING):
                self._remember(commands)
            self._perform(commands)
        if receipt is not None:
            down, number = receipt
            down.put(pb.CommandDown(acknowledged=number))

    def _remember(self, commands: Sequence[Command] = ()) -> None:
        """Writes the state down. A disk that is full must not end a training whose state is in memory; but no
        generation is formed unwritten: the next controller would use its number again."""
        while True:
            try:
                self._directory.write("state.json", self._coordinator.state.record())
            except OSError as problem:
                self._warn(f"{self._directory.path} cannot be written: {problem.strerror}")
                if any(isinstance(command, Join) for command in commands):
                    SYSTEM_CLOCK.sleep(TICK_S)
                    continue
            return

    def _learn_head(self) -> None:
        """A controller that was killed may have moved the head and not noted it."""
        if self._new:
            return
        try:
            head = read_head(self._open_store())
        except ResilientError as problem:
            self._warn(f"the store's head cannot be read: {problem}")
            return
        if head is not None and head.step > self._coordinator.state.head:
            self._take(HeadMoved(head.generation, head.step), None)

    def _note(self, fact: Fact) -> None:
        news = self._tells_of_store(fact)
        if fact.durable or news:
            try:
                self._journal.write(json.dumps({"time": SYSTEM_CLOCK.wall(), **fact.record()}) + "\n")
                self._journal.flush()
            except OSError as problem:
                self._warn(f"{self._directory.journal} cannot be written: {problem.strerror}")

    def _tells_of_store(self, fact: Fact) -> bool:
        """Keeps the owner informed of what the store refuses; true for the first refusal of a series."""
        if isinstance(fact, RestoreFailed):
            self._warn(f"step {fact.step} could not be restored: {fact.reason}")
        elif isinstance(fact, HeadMoved) and self._refused:
            self._refused = False
            self._coordinator.state.message = ""
        elif isinstance(fact, UploadMissed) and fact.failed:
            first, self._refused = not self._refused, True
            self._warn(f"step {fact.step} was not stored: {fact.reason}")
            return first
        return False

    def _warn(self, what: str) -> None:
        """For the owner, who asks for the status; the log may lie on the very disk that is full."""
        if self._coordinator.state.phase != Phase.ENDED:
            self._coordinator.state.message = what
        with contextlib.suppress(OSError):
            print(f"controller: {what}", file=sys.stderr, flush=True)  # its own log

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, WORKER_COMMANDS):
                self._down.put(pb.CommandDown(command=json.dumps(command.record())))
            elif isinstance(command, Announce):
                self._note(command.fact)
            elif isinstance(command, MoveHead):
                self._move_head(command)
            elif isinstance(command, EndRun):
                self._ended = command

    # ---- the store ----

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = open_store(self._settings.store)
        return self._store

    def _move_head(self, command: MoveHead) -> None:
        refs = tuple(ref for key in command.keys if (ref := parse_ref(key)) is not None)
        head = Head(Step(command.step), Generation(command.generation), len(command.keys), refs)
        try:
            store = self._open_store()
            move_head(store, read_head(store), head)
        except ResilientError as problem:
            # The step stays uncommitted and the next one is tried: a failed save must not stop training.
            self._warn(f"step {command.step} was not committed: {problem}")
            return
        self._facts.put((HeadMoved(command.generation, command.step), None))

    # ---- the agent ----

    def _watch_agent(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now - self._agent_checked < AGENT_POLL_S:
            return
        self._agent_checked = now
        if self._directory.process("agent") is None:
            start_detached(self._directory, "agent")

    def serve(self, facts: Iterator[pb.FactUp]) -> Iterator[pb.CommandDown]:
        """The agent's stream: one thread reads it while this one sends."""
        down: _Down = queue.SimpleQueue()
        self._down.put(None)  # ends an earlier stream of an agent that is gone
        self._down = down
        if self._shutdown is not None:
            down.put(self._shutdown)
        reader = threading.Thread(target=self._read, args=(facts, down), name="agent-facts", daemon=True)
        reader.start()
        while (command := down.get()) is not None:
            yield command

    def _read(self, facts: Iterator[pb.FactUp], down: _Down) -> None:
        # The stream's end is an RpcError of whichever kind: the agent went, or this server closes.
        with contextlib.suppress(Exception):
            for up in facts:
                receipt = (down, up.number) if up.number else None
                self._facts.put((fact_from(json.loads(up.fact)), receipt))
        down.put(None)

    # ---- the owner ----

    def status(self) -> dict[str, Any]:
        with self._lock:
            return self._coordinator.state.record()

    def stop(self, reason: str) -> None:
        self._facts.put((StopRequested(reason), None))

    # ---- the end ----

    def _end(self, end: EndRun) -> None:
        """Workers go first, then memory is committed, then it is removed."""
        self._shutdown = pb.CommandDown(command=json.dumps({"command": SHUTDOWN, "grace_s": end.grace_s}))
        self._down.put(self._shutdown)
        agent = self._directory.process("agent")
        if agent is not None and not agent.wait_gone(end.grace_s + 10.0):
            agent.kill()
            agent.wait_gone(10.0)
        self._commit()
        self._remember()
        if self._store is not None:
            self._store.close()
        if not self._directory.keeps_memory():
            self._directory.remove_leftovers()
        (self._directory.path / "agent.json").unlink(missing_ok=True)

    def _commit(self) -> None:
        state, settings = self._coordinator.state, self._settings
        if state.best == 0 and state.head < 0:
            return
        message = state.message.partition(_NOT_COMMITTED)[0]  # an earlier try may have failed, too
        try:
            head = commit_from_memory(
                self._open_store(),
                Path(settings.memory),
                self._directory.run,
                settings.nproc,
                self._directory.signing_key(),
                Generation(state.generation),
            )
        except (ResilientError, OSError) as problem:
            state.message = f"{message}{_NOT_COMMITTED}{problem}"
            return
        state.message = message
        state.head = max(state.head, -1 if head is None else head.step)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main(arguments: list[str]) -> None:
    directory = RunDirectory(Path(arguments[0]))
    if not detach(directory, "controller"):
        return
    with open(directory.path / "controller.lock", "w", opener=_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another one lives
        resume = directory.path / "resume"
        controller = Controller(directory, resume=resume.exists())
        resume.unlink(missing_ok=True)
        try:
            controller.run()
        except BaseException:
            traceback.print_exc()
            raise


if __name__ == "__main__":
    main(sys.argv[1:])
