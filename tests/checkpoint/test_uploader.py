"""The upload thread: late and early questions, slow and broken stores, rollbacks, the end."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resilient_sdk.checkpoint import (
    Failed,
    Head,
    Outcome,
    Policy,
    Skipped,
    Stored,
    Uploader,
    move_head,
    read_state,
    stored_steps,
)
from resilient_sdk.errors import StoreUnavailable
from resilient_sdk.faults import Fault, FaultPlan
from resilient_sdk.store import MemoryStore, Store
from resilient_sdk.store.wrappers import WrappedStore

WAIT = 20.0


class Gate(WrappedStore):
    """A store that stops at each put of a chunk until it is let through, or fails."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached = threading.Semaphore(0)
        self.open = threading.Event()
        self.failing = False

    def before(self, method: str) -> None:
        if method != "put":
            return
        self.reached.release()
        assert self.open.wait(WAIT)
        if self.failing:
            raise StoreUnavailable("injected")


class Bench:
    """One rank, its snapshots and its uploader."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.inner = MemoryStore()
        self.gate = Gate(self.inner)
        self.gate.open.set()
        self.file = run.snapshots(0)
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self.uploaders: list[Uploader] = []

    def uploader(self, store: Store | None = None, **more: Any) -> Uploader:
        made = Uploader(store or self.gate, self.file, self.run.identity(0), self.outcomes.put, **more)
        self.uploaders.append(made)
        return made

    def capture(self, uploader: Uploader, *steps: int, generation: int = 1) -> None:
        for step in steps:
            self.run.capture(self.file, 0, step, generation)
            uploader.captured(step)

    def outcome(self) -> Outcome:
        return self.outcomes.get(timeout=WAIT)

    def stop_in_upload(self, uploader: Uploader, step: int) -> None:
        self.gate.open.clear()
        uploader.store(step)
        assert self.gate.reached.acquire(timeout=WAIT)

    def stored(self, uploader: Uploader, step: int) -> Stored:
        uploader.store(step)
        outcome = self.outcome()
        assert isinstance(outcome, Stored), outcome
        assert self.run.is_it(read_state(self.inner, outcome.ref, self.run.key), 0, step)
        return outcome

    @property
    def steps(self) -> list[int]:
        return [ref.step for ref in stored_steps(self.inner, 0, self.run.key)]


@pytest.fixture
def bench(run: Any) -> Iterator[Bench]:
    made = Bench(run)
    yield made
    made.gate.open.set()
    for uploader in made.uploaders:
        assert uploader.close(WAIT)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("uploader")]
    assert made.outcomes.empty(), "one outcome for each question"


def eventually(holds: Callable[[], bool]) -> None:
    ticker = threading.Event()
    for _ in range(int(WAIT / 0.005)):
        if holds():
            return
        ticker.wait(0.005)
    raise AssertionError("it never came")


def test_a_step_captured_before_and_one_after_the_question(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    first = bench.stored(uploader, 1)
    uploader.store(4)
    bench.capture(uploader, 2, 3, 4, 5, 6, 7, 8)
    outcome = bench.outcome()
    assert isinstance(outcome, Stored)
    assert outcome.step == 4
    assert bench.run.is_it(read_state(bench.inner, outcome.ref, bench.run.key), 0, 4)
    assert outcome.nbytes == first.nbytes - 4096, "the chunk of the first step is not written again"
    assert outcome.seconds >= 0
    assert bench.steps == [4, 1]


def test_a_step_that_is_gone_is_skipped(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1, 2, 3)
    uploader.store(1)
    assert bench.outcome() == Skipped(1, "its snapshot is no longer in memory")
    bench.stored(uploader, 2)


def test_a_step_that_was_jumped_over_is_skipped(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    uploader.store(3)
    bench.capture(uploader, 4)
    assert bench.outcome() == Skipped(3, "its snapshot is no longer in memory")


def test_a_slow_store_tears_nothing_and_holds_up_nothing(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    bench.stop_in_upload(uploader, 1)
    bench.capture(uploader, *range(2, 12))  # ten captures during one upload
    assert bench.file.steps() == (11, 10, 1)
    uploader.store(11)  # captured, in a slot, but the uploader is busy
    bench.gate.open.set()
    first, second = bench.outcome(), bench.outcome()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert bench.run.is_it(read_state(bench.inner, first.ref, bench.run.key), 0, 1)
    assert bench.run.is_it(read_state(bench.inner, second.ref, bench.run.key), 0, 11)


def test_a_target_that_passed_while_the_store_was_slow_is_skipped(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    bench.stop_in_upload(uploader, 1)
    uploader.store(3)
    bench.capture(uploader, *range(2, 9))
    bench.gate.open.set()
    assert isinstance(bench.outcome(), Stored)
    assert bench.outcome() == Skipped(3, "its snapshot is no longer in memory")
    bench.stored(uploader, 8)


def test_a_newer_question_replaces_one_that_has_not_begun(bench: Bench) -> None:
    uploader = bench.uploader()
    uploader.store(5)
    uploader.store(6)
    assert bench.outcome() == Skipped(5, "step 6 was asked for instead")
    bench.capture(uploader, 5, 6)
    assert isinstance(bench.outcome(), Stored)
    assert bench.steps == [6]


def test_a_question_that_is_repeated_is_answered_once(bench: Bench) -> None:
    # After a recovery every rank is asked again for the step that was under way: it must not count as missed.
    uploader = bench.uploader()
    uploader.store(5)
    uploader.store(5)
    bench.capture(uploader, 5)
    assert isinstance(bench.outcome(), Stored)
    assert bench.outcomes.empty()


def test_a_step_that_is_run_again_is_uploaded_as_it_was_then(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 4)
    bench.stop_in_upload(uploader, 4)
    bench.capture(uploader, 5)
    uploader.store(5)
    bench.file.forget_after(4)
    bench.capture(uploader, 5, generation=2)
    uploader.store(5)
    bench.gate.open.set()
    first, second = bench.outcome(), bench.outcome()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (second.step, second.ref.generation) == (5, 2)
    assert bench.outcomes.empty()


def test_a_failed_put_is_an_outcome_and_the_next_step_is_tried(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    bench.stored(uploader, 1)
    bench.gate.failing = True
    bench.capture(uploader, 2)
    uploader.store(2)
    outcome = bench.outcome()
    assert isinstance(outcome, Failed)
    assert (outcome.step, type(outcome.error)) == (2, StoreUnavailable)
    bench.gate.failing = False
    bench.capture(uploader, 3)
    bench.stored(uploader, 3)


@pytest.mark.parametrize("point", ["upload", "manifest"])
def test_a_bug_is_a_failed_outcome_too(bench: Bench, point: str, tmp_path: Any) -> None:
    uploader = bench.uploader(faults=FaultPlan((Fault(point, action="raise"),), tmp_path))
    bench.capture(uploader, 1)
    uploader.store(1)
    outcome = bench.outcome()
    assert isinstance(outcome, Failed)
    assert "injected" in str(outcome.error)
    bench.stored(uploader, 1)


def test_a_rollback_during_the_upload(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1, 2)
    bench.stop_in_upload(uploader, 2)
    bench.file.forget_after(1)
    bench.capture(uploader, 2, 3, generation=2)
    uploader.store(2)
    bench.gate.open.set()
    assert bench.outcome() == Skipped(2, "step 2 was rolled back")
    outcome = bench.outcome()
    assert isinstance(outcome, Stored)
    assert outcome.ref.generation == 2
    assert bench.run.is_it(read_state(bench.inner, outcome.ref, bench.run.key), 0, 2, generation=2)


def test_retention_follows_the_head(bench: Bench) -> None:
    uploader = bench.uploader(policy=Policy(keep=2))
    for step in range(1, 6):
        bench.capture(uploader, step)
        bench.stored(uploader, step)
    uploader.head_moved(2)
    uploader.head_moved(4)
    eventually(lambda: bench.steps == [5, 4, 2])
    uploader.head_moved(5)
    eventually(lambda: bench.steps == [5, 4])
    bench.capture(uploader, 6)
    bench.stored(uploader, 6)


def test_chunks_of_a_manifest_that_was_deleted_are_written_again(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    first = bench.stored(uploader, 1)
    uploader.head_moved(2)
    eventually(lambda: list(bench.inner.keys()) == [])
    bench.capture(uploader, 3)
    assert bench.stored(uploader, 3).nbytes == first.nbytes


def test_over_the_budget_is_skipped_with_the_reason(bench: Bench) -> None:
    uploader = bench.uploader(policy=Policy(budget_bytes=1000))
    bench.capture(uploader, 1)
    uploader.store(1)
    outcome = bench.outcome()
    assert isinstance(outcome, Skipped)
    assert "budget of 1000" in outcome.reason
    assert list(bench.inner.keys()) == []


def test_a_new_owner_sweeps_and_keeps_what_was_committed(bench: Bench) -> None:
    uploader = bench.uploader()
    for step in (1, 2, 3):
        bench.capture(uploader, step)
        last = bench.stored(uploader, step)
    assert uploader.close(WAIT)
    one_rank = bench.inner
    move_head(one_rank, None, Head(3, 1, 1, (last.ref,)))
    one_rank.put("rank-00000/chunks/" + "a" * 32, b"garbage")
    successor = bench.uploader()
    bench.capture(successor, 4)
    bench.stored(successor, 4)
    assert "rank-00000/chunks/" + "a" * 32 not in set(one_rank.keys())
    successor.head_moved(4)
    eventually(lambda: bench.steps == [4, 3])


def test_a_store_that_is_down_at_the_start_is_looked_at_again(bench: Bench) -> None:
    class Down(WrappedStore):
        down = True

        def before(self, method: str) -> None:
            if self.down:
                raise StoreUnavailable("injected")

    store = Down(bench.inner)
    uploader = bench.uploader(store)
    bench.capture(uploader, 1)
    uploader.store(1)
    assert isinstance(bench.outcome(), Failed)
    store.down = False
    bench.stored(uploader, 1)


def test_close_lets_an_upload_finish(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    bench.stop_in_upload(uploader, 1)
    threading.Timer(0.05, bench.gate.open.set).start()
    assert uploader.close(WAIT)
    assert isinstance(bench.outcome(), Stored)
    uploader.store(2)
    uploader.captured(2)
    uploader.head_moved(2)


def test_close_cuts_an_upload_that_takes_too_long(bench: Bench) -> None:
    uploader = bench.uploader()
    bench.capture(uploader, 1)
    bench.stop_in_upload(uploader, 1)
    uploader.store(9)
    assert not uploader.close(0.05), "the call of the store that is under way cannot be cut"
    bench.gate.open.set()
    assert uploader.close(WAIT)
    assert {type(bench.outcome()), type(bench.outcome())} == {Failed, Skipped}
    assert bench.steps == []


def test_a_listener_that_raises_does_not_end_the_uploads(bench: Bench) -> None:
    heard: queue.Queue[Outcome] = queue.Queue()

    def listen(outcome: Outcome) -> None:
        heard.put(outcome)
        raise RuntimeError("a listener's bug")

    uploader = Uploader(bench.inner, bench.file, bench.run.identity(0), listen)
    for step in (1, 2):
        bench.capture(uploader, step)
        uploader.store(step)
        assert isinstance(heard.get(timeout=WAIT), Stored)
    assert uploader.close(WAIT)


@pytest.mark.parametrize(("policy", "nice"), [(Policy(), 19), (Policy(nice=5), 5)])
def test_the_thread_has_a_name_and_a_low_priority_alone(bench: Bench, policy: Policy, nice: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    uploader = bench.uploader(policy=policy)
    bench.capture(uploader, 1)
    bench.stored(uploader, 1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "uploader-0")
    assert not thread.daemon
    assert thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == nice
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_questions_captures_and_rollbacks_at_random_get_one_answer_each(bench: Bench) -> None:
    uploader = bench.uploader()
    asked = 0
    for step in range(1, 200):
        if step % 3 == 0:
            uploader.store(step + step % 5 - 1)
            asked += 1
        if step % 50 == 0:
            bench.file.forget_after(step - 2)
        bench.capture(uploader, step, generation=1 + step // 50)
        uploader.head_moved(step - 10)
    assert uploader.close(WAIT)
    outcomes = [bench.outcome() for _ in range(asked)]
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    for ref in stored_steps(bench.inner, 0, bench.run.key):
        state = read_state(bench.inner, ref, bench.run.key)
        assert bench.run.is_it(state, 0, ref.step, ref.generation)


FORGETFUL = """
import sys
from pathlib import Path
from resilient_sdk.checkpoint import Identity, SnapshotFile, Uploader
from resilient_sdk.store import MemoryStore
Uploader(MemoryStore(), SnapshotFile(Path(sys.argv[1])), Identity("r", 0, 1, b"k" * 16), print)
raise RuntimeError("a user's bug")
"""


def test_a_program_that_never_closes_it_ends_all_the_same(run: Any) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(run.root / "rank")]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=WAIT)
    assert ended.returncode == 1
    assert b"a user's bug" in ended.stderr
