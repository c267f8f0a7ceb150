"""The thread that brings a rank's snapshots to the store while training goes on."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from resilient_sdk.checkpoint.head import read_head
from resilient_sdk.checkpoint.manifest import Manifest, ManifestRef
from resilient_sdk.checkpoint.retention import Namespace, Policy
from resilient_sdk.checkpoint.snapshot import Pinned, SnapshotFile
from resilient_sdk.checkpoint.writer import Identity, new_chunks, store_pinned
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.errors import CheckpointError, NothingToRestore, ResilientError, StoreUnavailable
from resilient_sdk.faults import NO_FAULTS, FaultPlan
from resilient_sdk.ids import Step
from resilient_sdk.store.base import Store
from resilient_sdk.store.wrappers import WrappedStore

_logger = logging.getLogger(__name__)
_ORPHANED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """The manifest is stored. `nbytes` were written for it in `seconds`; chunks stored before do not
    count."""

    ref: ManifestRef
    nbytes: int
    seconds: float

    @property
    def step(self) -> Step:
        return self.ref.step


@dataclass(frozen=True, slots=True)
class Skipped:
    """Nothing went wrong and nothing was stored."""

    step: Step
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The store, or the snapshot, is not all right. Training is; the next step is tried."""

    step: Step
    error: Exception


Outcome: TypeAlias = Stored | Skipped | Failed


class Uploader:
    """Stores the steps that are asked for, one at a time, and deletes what the policy does not keep.

    `store`, `captured` and `head_moved` return at once and raise nothing; they may be called from any thread.
    Each question of `store` is answered by exactly one outcome, given to `on_outcome` on the uploader's own
    thread. What fails becomes an outcome, never an exception in training.
    """

    def __init__(
        self,
        store: Store,
        snapshots: SnapshotFile,
        identity: Identity,
        on_outcome: Callable[[Outcome], None],
        policy: Policy | None = None,
        faults: FaultPlan = NO_FAULTS,
    ) -> None:
        """Starts the thread. Nobody else may write to this rank's part of the store until `close`."""
        self._store = _Cuttable(store)
        self._snapshots = snapshots
        self._identity = identity
        self._on_outcome = on_outcome
        self._faults = faults
        self._policy = policy or Policy()
        self._namespace = Namespace(self._store, identity, self._policy)
        self._last: tuple[ManifestRef, Manifest] | None = None
        self._committed: set[Step] = set()
        # What the callers leave for the thread; guarded by this condition, which is never held during I/O.
        self._changed = threading.Condition()
        self._target: Step | None = None
        self._pinned: Pinned | None = None
        self._busy = False
        self._answers: deque[Outcome] = deque()
        self._moves: deque[Step] = deque()
        self._closing = False
        # Not a daemon: those are cut at interpreter exit in the middle of a system call, with locks held.
        self._thread = threading.Thread(target=self._run, name=f"uploader-{identity.rank}", daemon=False)
        self._thread.start()

    def store(self, step: Step) -> None:
        """Asks for the snapshot of `step`, captured already or still to come. A newer question replaces one
        whose upload has not begun, which is skipped then; the same one again is the same question."""
        with self._changed:
            if self._closing:
                self._answer(Skipped(step, "the uploader is closed"))
                return
            if self._target == step:
                # Asked again after a rollback: what was pinned before it is of a step that never was.
                self._unpin()
            else:
                self._drop_target(f"step {step} was asked for instead")
            self._target = step
            self._claim()
            self._changed.notify()

    def captured(self, step: Step) -> None:
        """Says that the snapshot of `step` is complete. To be called before the next capture begins: if the
        step is wanted its slot is pinned here and now."""
        with self._changed:
            if self._target is not None and self._target <= step:
                self._claim()
                self._changed.notify()

    def head_moved(self, step: Step) -> None:
        """Says that `step` is committed; what is not kept any more is deleted."""
        with self._changed:
            self._moves.append(step)
            self._changed.notify()

    def close(self, timeout: float = 10.0) -> bool:
        """Ends the thread: a running upload may finish for `timeout` seconds, then it is cut between two
        calls of the store (Failed), with as long again for the one that is under way. Returns whether the
        thread is gone; a store that never answers can keep it. Not for `on_outcome` to call. May be
        repeated."""
        with self._changed:
            self._closing = True
            self._drop_target("the uploader is closed")
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._store.cut()
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _answer(self, outcome: Outcome) -> None:
        self._answers.append(outcome)
        self._changed.notify()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._snapshots.release(self._pinned)
            self._pinned = None

    def _drop_target(self, reason: str) -> None:
        self._unpin()
        if self._target is not None:
            self._answer(Skipped(self._target, reason))
            self._target = None

    def _claim(self) -> None:
        """Pins the wanted step's slot if it is there and no other is pinned; answers if it can never be."""
        if self._target is None or self._pinned is not None or self._busy:
            return
        try:
            self._pinned = self._snapshots.pin(self._target)
        except NothingToRestore:
            newest = self._snapshots.newest()
            if newest is not None and newest > self._target:
                self._drop_target("its snapshot is no longer in memory")
        except CheckpointError as error:
            self._answer(Failed(self._target, error))
            self._target = None

    def _run(self) -> None:
        _lower_priority(self._policy.nice)
        self._attempt("look at what is stored", self._open)
        while work := self._next():
            work()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                if self._answers:
                    return partial(self._tell, self._answers.popleft())
                if self._closing or not threading.main_thread().is_alive():
                    return None
                if self._moves:
                    self._learn(self._moves)
                    self._moves.clear()
                    return self._retain
                if self._pinned is not None:
                    return partial(self._upload, self._take())
                # Looks up now and then: a program that ends without `close` must end all the same.
                self._changed.wait(_ORPHANED_SECONDS)

    def _take(self) -> Pinned:
        pinned, self._pinned, self._target = self._pinned, None, None
        if pinned is None:
            raise AssertionError("asked by _next, which has looked")
        self._busy = True
        return pinned

    def _upload(self, pinned: Pinned) -> None:
        outcome = self._outcome(pinned)
        with self._changed:
            self._snapshots.release(pinned)
            self._busy = False
            self._claim()
        self._tell(outcome)

    def _outcome(self, pinned: Pinned) -> Outcome:
        step = pinned.table.step
        try:
            return self._stored(pinned)
        except NothingToRestore as error:
            outcome: Outcome = Skipped(step, error.what)
        except ResilientError as error:
            outcome = Failed(step, error)
        except Exception as error:
            _logger.exception("the upload of step %s failed", step)
            outcome = Failed(step, error)
        # What was written before it is unknown: it is looked at before the next upload, and swept.
        self._namespace.doubt()
        return outcome

    def _stored(self, pinned: Pinned) -> Outcome:
        started = SYSTEM_CLOCK.monotonic()
        self._namespace.open()
        reason = self._namespace.make_room(pinned.table, self._committed)
        if reason:
            return Skipped(pinned.table.step, reason)
        previous = self._previous()
        nbytes = sum(piece.nbytes for piece in new_chunks(pinned.table, previous))
        ref, manifest = store_pinned(
            self._store, self._snapshots, pinned, self._identity, previous, self._faults
        )
        self._namespace.add(ref, manifest)
        self._last = (ref, manifest)
        return Stored(ref, nbytes, SYSTEM_CLOCK.monotonic() - started)

    def _previous(self) -> Manifest | None:
        # Only what is stored still vouches for its chunks.
        if self._last is None or self._last[0] not in self._namespace.refs:
            return None
        return self._last[1]

    def _open(self) -> None:
        self._namespace.open()
        head = read_head(self._store)
        if head is not None:
            # An earlier life of this rank was told which steps were committed; keep those, for they may be.
            self._learn({head.step, *(ref.step for ref in self._namespace.refs if ref.step <= head.step)})

    def _learn(self, steps: Iterable[Step]) -> None:
        # Only as many as will ever be kept: a run has millions of steps.
        self._committed = set(sorted({*self._committed, *steps})[-self._policy.keep :])

    def _retain(self) -> None:
        self._attempt("delete old steps", lambda: self._namespace.retain(self._committed))

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except ResilientError as error:
            _logger.warning("rank %s could not %s, will try again: %s", self._identity.rank, what, error)
        except Exception:
            _logger.exception("rank %s could not %s", self._identity.rank, what)

    def _tell(self, outcome: Outcome) -> None:
        try:
            self._on_outcome(outcome)
        except Exception:
            # A listener's bug must not end the uploads.
            _logger.exception("nobody took the outcome %s", outcome)


class _Cuttable(WrappedStore):
    """A store whose calls can be made to fail from another thread."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._is_cut = threading.Event()

    def cut(self) -> None:
        self._is_cut.set()

    def before(self, method: str) -> None:  # noqa: ARG002
        if self._is_cut.is_set():
            raise StoreUnavailable("the uploader is closing", fix="give it more time to close")


def _lower_priority(nice: int) -> None:
    # On Linux a thread has a priority of its own; training's stays as it is.
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        _logger.info("the uploader runs at normal priority: %s", error)
