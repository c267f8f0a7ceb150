"""The agent: one a node. Starts workers through the zygote, sees them die, carries facts up and commands down.

It also brings the controller back when that is killed: each of the two watches the other, so a run has no single
process whose death ends it.
"""

import contextlib
import json
import os
import queue
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.config import child_environment
from resilient_sdk.coordination.commands import Command, KillWorker, StartWorker, command_from
from resilient_sdk.errors import RunUnreachable
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    Fact,
    StartFailed,
    StepBegun,
    WorkerExited,
    WorkerStarted,
    fact_from,
)
from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.rpc.channels import Client
from resilient_sdk.rpc.frames import Channel, ChannelClosed, channel_pair
from resilient_sdk.runtime.detached import detach, start_detached
from resilient_sdk.runtime.processes import ProcessId, adopt_orphans
from resilient_sdk.runtime.rundir import RunDirectory, open_private

CONTROLLER_POLL_S = 0.2
MAX_CONTROLLER_STARTS = 10
MAX_ZYGOTE_FAILURES = 3
"""A zygote that cannot even import what it needs will not be able to the next time."""
SHUTDOWN = "Shutdown"
"""What a controller sends last: no worker is to be left after `grace_s`."""


class Outbox:
    """Facts on their way up. Numbered ones are kept until acknowledged: a controller's death loses none of them."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._kept: list[pb.FactUp] = []
        self._fleeting: list[pb.FactUp] = []
        self._last = 0
        self._sent = 0
        self._stream = 0

    def put(self, record: dict[str, Any], *, fleeting: bool = False) -> None:
        with self._lock:
            if fleeting:
                self._fleeting.append(pb.FactUp(number=0, fact=json.dumps(record)))
            else:
                self._last += 1
                self._kept.append(pb.FactUp(number=self._last, fact=json.dumps(record)))
            self._lock.notify_all()

    def acknowledge(self, number: int) -> None:
        with self._lock:
            self._kept = [fact for fact in self._kept if fact.number > number]

    def unacknowledged_exits(self) -> set[int]:
        """Workers whose death the controller may not have heard of yet."""
        with self._lock:
            records = [json.loads(fact.fact) for fact in self._kept]
        return {record["worker"] for record in records if record["fact"] == WorkerExited.__name__}

    def stream(self, first: dict[str, Any]) -> Iterator[pb.FactUp]:
        """One connection's facts: `first`, then all not acknowledged, then new ones, until another one begins."""
        with self._lock:
            self._stream += 1
            stream, self._sent = self._stream, 0
            self._fleeting.clear()
        yield pb.FactUp(number=0, fact=json.dumps(first))
        while True:
            with self._lock:
                self._lock.wait_for(lambda: stream != self._stream or bool(self._fleeting or self._unsent()))
                if stream != self._stream:
                    return
                due = self._unsent()
                if due:
                    self._sent = due[-1].number
                due += self._fleeting
                self._fleeting = []
            yield from due

    def _unsent(self) -> list[pb.FactUp]:
        return [fact for fact in self._kept if fact.number > self._sent]

    def end_stream(self) -> None:
        with self._lock:
            self._stream += 1
            self._lock.notify_all()


class _Worker:
    """One living worker: its process, its channel, the descriptor that tells its death."""

    def __init__(self, number: int, pid: int, channel: Channel) -> None:
        self.number = number
        self.pid = pid
        self.channel = channel
        self.pidfd = os.pidfd_open(pid)


class Agent:
    """The agent of one run on this node. `run` returns when the controller has ordered the shutdown."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._outbox = Outbox()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._workers: dict[int, _Worker] = {}
        self._ordered: dict[int, tuple[Channel, socket.socket]] = {}
        self._seen: set[int] = set()
        self._orphaned: set[int] = (
            set()
        )  # process groups of dead workers; this process is the parent of what is left
        self._zygote: subprocess.Popen[bytes] | None = None
        self._zygote_channel: Channel | None = None
        self._zygote_ready = False
        self._zygote_failures = 0  # in a row
        self._zygote_log = directory.logs / "zygote.log"
        self._link: threading.Thread | None = None
        self._ending = threading.Event()
        self._kill_at: float | None = None

    def run(self) -> None:
        adopt_orphans()
        self._directory.note_process("agent")
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        self._start_zygote()
        self._link = threading.Thread(target=self._talk, name="controller-link")
        self._link.start()
        try:
            while not self._done():
                for key, _ in self._selector.select(timeout=0.5):
                    key.data()
                self._obey_all()
                self._reap_orphans()
        finally:
            self._close()

    # ---- the zygote ----

    def _start_zygote(self) -> None:
        channel, theirs = channel_pair()
        with open_private(self._zygote_log) as log:
            self._zygote = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "resilient_sdk.runtime.zygote",
                    str(theirs.fileno()),
                    str(self._directory.path),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
            )
        theirs.close()
        self._zygote_channel, self._zygote_ready = channel, False
        self._selector.register(channel, selectors.EVENT_READ, self._hear_zygote)

    def _hear_zygote(self) -> None:
        assert self._zygote_channel is not None
        try:
            answers = self._zygote_channel.receive_ready()
        except ChannelClosed:
            self._zygote_died()
            return
        for answer in answers:
            if "ready" in answer:
                self._zygote_ready = True
                for number in self._ordered:
                    self._order_fork(number)
            else:
                self._worker_forked(answer["worker"], answer["pid"])

    def _zygote_died(self) -> None:
        """A new one is started; forks that the old one owed are asked for again."""
        assert self._zygote is not None
        assert self._zygote_channel is not None
        self._selector.unregister(self._zygote_channel)
        self._zygote_channel.close()
        self._zygote.wait()
        # One that was forked and not reported loses its channel, and ends: two would answer to one number.
        for number in self._ordered:
            self._close_ordered(number)
            self._ordered[number] = channel_pair()
        self._zygote_failures = 0 if self._zygote_ready else self._zygote_failures + 1
        if not self._ending.is_set() and self._zygote_failures < MAX_ZYGOTE_FAILURES:
            self._start_zygote()
            return
        self._zygote, self._zygote_channel, self._zygote_ready = None, None, False
        if not self._ending.is_set():
            self._report(StartFailed(f"no worker can be started: {_last_line(self._zygote_log)}"))

    def _close_ordered(self, number: int) -> None:
        for end in self._ordered[number]:
            end.close()

    def _order_fork(self, number: int) -> None:
        assert self._zygote_channel is not None
        _, theirs = self._ordered[number]
        with open_private(self._directory.worker_log(number)) as log:
            try:
                self._zygote_channel.send({"worker": number}, (theirs.fileno(), log.fileno()))
            except ChannelClosed:
                return  # its death is heard by the selector, and the order is given to the next one

    # ---- workers ----

    def _start_worker(self, number: int) -> None:
        if number in self._seen:
            return
        self._seen.add(number)
        self._ordered[number] = channel_pair()
        if self._zygote_ready:
            self._order_fork(number)

    def _worker_forked(self, number: int, pid: int) -> None:
        channel, theirs = self._ordered.pop(number)
        theirs.close()
        worker = _Worker(number, pid, channel)
        self._workers[number] = worker
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear_worker(worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._worker_died(worker))
        self._report(WorkerStarted(number, pid))

    def _hear_worker(self, worker: _Worker) -> None:
        if worker.channel.fileno() < 0:
            return  # closed by an event of the same round
        try:
            records = worker.channel.receive_ready()
        except ChannelClosed:
            # It closed its end; whether it is dead, its pidfd tells.
            self._selector.unregister(worker.channel)
            worker.channel.close()
            return
        for record in records:
            self._report(fact_from(record))

    def _worker_died(self, worker: _Worker) -> None:
        at = SYSTEM_CLOCK.monotonic()
        self._hear_last_words(worker)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        self._end_group(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        # Reported before it is forgotten: whoever is in neither list would count as vanished.
        self._report(
            WorkerExited(worker.number, code if code >= 0 else None, -code if code < 0 else None, at)
        )
        del self._workers[worker.number]

    def _end_group(self, pid: int) -> None:
        """What a dead rank has forked (its data loader) goes with it; who had ended in order may leave something.

        Before the worker is waited for: until then its number is nobody else's.
        """
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and (ended.si_code, ended.si_status) != (os.CLD_EXITED, 0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._orphaned.add(pid)

    def _reap_orphans(self) -> None:
        for group in tuple(self._orphaned):
            try:
                while os.waitpid(-group, os.WNOHANG)[0] != 0:
                    continue
            except ChildProcessError:
                self._orphaned.discard(group)

    def _hear_last_words(self, worker: _Worker) -> None:
        """What it said before it died is reported before its death."""
        if worker.channel.fileno() < 0:
            return
        self._selector.unregister(worker.channel)
        # Not until the end of the stream: a child of the worker (a data loader's) may hold the other end open.
        with contextlib.suppress(ChannelClosed):
            while select.select([worker.channel], [], [], 0)[0]:
                for record in worker.channel.receive_ready():
                    self._report(fact_from(record))
        worker.channel.close()

    def _report(self, fact: Fact) -> None:
        self._outbox.put(fact.record(), fleeting=isinstance(fact, Beat | StepBegun))

    # ---- commands ----

    def _drain_wake(self) -> None:
        self._wake_read.recv(4096)

    def _obey_all(self) -> None:
        while not self._commands.empty():
            record = self._commands.get()
            if record["command"] == SHUTDOWN:
                self._ending.set()
                self._kill_at = SYSTEM_CLOCK.monotonic() + record["grace_s"]
            else:
                self._obey(command_from(record))

    def _obey(self, command: Command) -> None:
        number: int = command.worker  # type: ignore[attr-defined]  # every travelling command has one
        if isinstance(command, StartWorker):
            self._start_worker(number)
        elif isinstance(command, KillWorker):
            if number in self._workers:
                signal.pidfd_send_signal(self._workers[number].pidfd, signal.SIGKILL)
        elif number in self._workers and self._workers[number].channel.fileno() >= 0:
            try:
                self._workers[number].channel.send(command.record())
            except ChannelClosed:
                return  # it is dying; its pidfd will tell

    def _done(self) -> bool:
        if self._kill_at is None:
            return False
        if SYSTEM_CLOCK.monotonic() >= self._kill_at:
            for worker in self._workers.values():
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        return not self._workers

    def _close(self) -> None:
        self._ending.set()
        for number in self._ordered:
            self._close_ordered(number)
        if self._zygote is not None and self._zygote_channel is not None:
            self._zygote_channel.close()
            self._zygote.kill()
            self._zygote.wait()
        self._outbox.end_stream()
        if self._link is not None:
            self._link.join()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    # ---- the controller (another thread) ----

    def _talk(self) -> None:
        """Keeps a stream to the controller; starts the controller again when its process is gone."""
        attempts = 0
        while not self._ending.is_set():
            process = self._directory.process("controller")
            address = self._directory.read("controller.json")
            if process is not None and address is not None:
                if self._talk_to(address["address"], process):
                    attempts = 0
            elif attempts == MAX_CONTROLLER_STARTS:
                print(
                    f"agent: the controller ended {attempts} times as it started, see controller.log; giving up",
                    file=sys.stderr,
                )
                self._commands.put({"command": SHUTDOWN, "grace_s": 0.0})
                self._wake_write.send(b"!")
                return
            else:
                attempts += 1
                _reap(address)
                try:
                    start_detached(self._directory, "controller")
                except RunUnreachable as problem:
                    print(f"agent: {problem}", file=sys.stderr)
            self._ending.wait(CONTROLLER_POLL_S)

    def _talk_to(self, address: str, process: ProcessId) -> bool:
        """One connection, to its end. Tells whether the controller said anything: one that cannot start does not."""
        client = Client(address, self._directory.token())
        heard = False
        try:
            known = {*self._workers, *self._ordered}
            # Taken after: one that dies in between is in both. Its exit, told next, says how it ended.
            alive = tuple(sorted(known | self._outbox.unacknowledged_exits()))
            for answer in client.serve(self._outbox.stream(AgentJoined(alive).record())):
                heard = True
                self._outbox.acknowledge(answer.acknowledged)
                if answer.command:
                    self._take_command(answer.command)
        except RunUnreachable:
            if process.alive():
                print(
                    f"agent: controller {process.pid} dropped the stream, connecting again", file=sys.stderr
                )
        finally:
            self._outbox.end_stream()
            client.close()
        return heard

    def _take_command(self, text: str) -> None:
        self._commands.put(json.loads(text))
        self._wake_write.send(b"!")


def _last_line(log: Path) -> str:
    """Of a traceback: what it is about."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), f"{log} is empty")


def _reap(record: dict[str, Any] | None) -> None:
    """A dead controller that this agent had started is its child, and stays a zombie until it is waited for."""
    if record is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(record["pid"], os.WNOHANG)


def main(arguments: list[str]) -> None:
    directory = RunDirectory(Path(arguments[0]))
    if detach(directory, "agent"):
        Agent(directory).run()


if __name__ == "__main__":
    main(sys.argv[1:])
