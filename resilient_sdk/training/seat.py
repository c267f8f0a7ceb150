"""A rank's seat: what a worker holds while it owns a rank, taken and left as generations come and go.

Recovery, as a member runs it: leave the broken group, wait for a rank, say what can be restored, form the
group, build the engine, go to the common step, train.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]  # not exported by its stubs

from resilient_sdk.checkpoint.head import read_head
from resilient_sdk.checkpoint.layout import State
from resilient_sdk.checkpoint.manifest import ManifestRef, rank_name
from resilient_sdk.checkpoint.reader import read_state, stored_steps
from resilient_sdk.checkpoint.retention import Policy
from resilient_sdk.checkpoint.snapshot import SnapshotFile
from resilient_sdk.checkpoint.uploader import Failed, Outcome, Stored, Uploader
from resilient_sdk.checkpoint.writer import Identity
from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.coordination.commands import Finish, Go, Join, RestoreFrom
from resilient_sdk.errors import CheckpointError, ConfigError, StaleGeneration, StoreError, one_line
from resilient_sdk.events import (
    Fact,
    ManifestStored,
    Restored,
    RestoreFailed,
    StepBegun,
    StepFailed,
    StepFinished,
    StepsDone,
    StepsOffered,
    TrainFailed,
    UploadMissed,
)
from resilient_sdk.ids import Generation, Rank, RunId, Step
from resilient_sdk.store.address import open_store
from resilient_sdk.training import engine as engines
from resilient_sdk.training.blame import from_collective
from resilient_sdk.training.engine import EngineSpec
from resilient_sdk.training.group import Group, export_rank, solo_store
from resilient_sdk.training.member import GenerationOver, Member
from resilient_sdk.training.rank_state import RankState
from resilient_sdk.training.rng import derive_seed, seed_everything
from resilient_sdk.training.unranked import hide_group_rank, hide_rank

UPLOAD_NICE = 0
"""An upload of 30 MB needs 10 ms of a processor, and at nice 5 took 80 ms to get them: a step is committed late
for nothing. At 19 it is held up while it holds the GIL, and its own rank with it."""
GROUP_TIMEOUT_S = 1800.0
"""The coordinator's deadlines find a hang long before; this one ends a group that nobody coordinates any more."""


class Seat:
    """One worker's rank, group and engine. Used by the main thread only.

    `rank` is None and `generation` 0 before the first `take`; `step` counts finished optimizer steps.
    """

    def __init__(self, member: Member, spec: EngineSpec) -> None:
        self.rank: int | None = None
        self.generation = 0
        self.step = 0
        self.engine: Any = None
        self._member = member
        self._spec = spec
        self._group: Group | None = None
        self._snapshots: SnapshotFile | None = None
        self._uploader: Uploader | None = None
        self._store = open_store(member.context.store)
        self._phases: dict[str, float] = {}
        self._restored: Restored | None = None  # what this generation's restore was answered with

    # ---- a place without a rank ----

    def rehearse(self) -> None:
        """A group of one and an engine in it: all that a rank needs, warmed up, and nothing of it kept."""
        self._group = Group.form(
            rank=0, world_size=1, store=solo_store(), timeout_s=GROUP_TIMEOUT_S, local_rank=self._device()
        )
        try:
            self.engine = engines.build(self._spec, solo=True, world_size=self._member.context.nproc)
        finally:
            hide_rank(self._member.context.nproc)

    def rehearse_step(self) -> None:
        """The rehearsal's step begins: DeepSpeed looks for the device in the environment."""
        export_rank(0, self._member.context.nproc, self._device())
        hide_group_rank()

    def _device(self) -> int:
        # Beside the ranks' devices in turn, so that not all standbys warm up on the first one.
        return self._member.context.worker % max(1, torch.cuda.device_count())

    # ---- a rank ----

    def take(self, join: Join) -> None:
        """Forms the group of `join` and builds the engine in it; the state is whatever the user's model has.

        Raises:
            GenerationOver: it broke meanwhile. Leave, and wait for the next rank.
        """
        self._member.context.faults.point("promote", rank=join.rank)
        self._own(join.rank)
        self.generation = join.generation
        with self._phase("form"):
            self._group = self._form(join)
        self._member.entered(self._group, join.generation)
        self._member.context.faults.point("build", rank=join.rank)
        with self._phase("rebuild"):
            self.engine = engines.build(
                self._spec, solo=False, world_size=join.world_size, equal_weights=not join.restores
            )
        self._group.watch_sockets()

    def _form(self, join: Join) -> Group:
        # A file in the run's own directory: unlike a TCPStore it can be neither read nor written by a stranger,
        # and no process has to live for it.
        path = self._member.context.rendezvous / f"generation-{join.generation}"
        path.touch(mode=0o600)  # or torch would make it readable by all
        file = FileStore(str(path), join.world_size)
        try:
            return Group.form(
                rank=join.rank,
                world_size=join.world_size,
                store=PrefixStore("group", file),
                timeout_s=GROUP_TIMEOUT_S,
                cancelled=lambda: self._member.is_over(join.generation),
            )
        except StaleGeneration as problem:
            raise GenerationOver from problem

    def _own(self, rank: int) -> None:
        if rank == self.rank:
            return
        context = self._member.context
        self.rank = rank
        self._snapshots = SnapshotFile(context.memory / rank_name(Rank(rank)))
        identity = Identity(RunId(context.run), Rank(rank), context.nproc, context.signing_key)
        budget = context.store_budget_bytes // context.nproc
        self._uploader = Uploader(
            self._store,
            self._snapshots,
            identity,
            self._uploaded,
            Policy(budget_bytes=budget, nice=UPLOAD_NICE),
            context.faults,
        )
        self._member.uploads = self._uploader

    def leave(self) -> None:
        """Out of the group and the engine, with nothing of either left in the process."""
        with self._phase("leave"):
            engine, self.engine = self.engine, None
            engines.tear_down(engine)
            if self._group is not None:
                self._group.leave()
                self._group = None
            self._member.left()

    def close(self) -> None:
        """Ends uploads and the group; what was captured stays in memory."""
        self.leave()
        self._member.uploads = None
        if self._uploader is not None:
            self._uploader.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._store.close()

    # ---- its state ----

    def settle(self, state: RankState) -> None:
        """Goes where every member goes, and returns when all are there.

        Raises:
            GenerationOver: the generation broke meanwhile.
        """
        assert self.rank is not None
        state.own(self.rank)
        self._member.forget_answers()
        self._restored = None
        refs = self._offer()
        self._member.answer(StepsOffered(self._member.context.worker, self.generation, tuple(refs)))
        while True:
            order = self._member.await_of_generation(self.generation, RestoreFrom, Go)
            if isinstance(order, Go):
                return
            assert isinstance(order, RestoreFrom)
            self._restore(order, state, refs)

    def recover(self, state: RankState) -> None:
        """From a broken generation to the next one that stands, however many break in between."""
        while True:
            self._phases = {}
            self.leave()
            with self._phase("wait"):
                join = self._member.await_join()
            if self._try(lambda join=join: self._take_and_settle(join, state), join.generation):
                return

    def begin(self, join: Join) -> None:
        """The first group and engine of a worker that was born with a rank."""
        while not self._try(lambda join=join: self.take(join), join.generation):
            self.leave()
            join = self._member.await_join()

    def open(self, state: RankState) -> None:
        """The first settling of a worker that was born with a rank."""
        if not self._try(lambda: self.settle(state), self.generation):
            self.recover(state)

    def begun(self) -> None:
        """The next step begins."""
        context = self._member.context
        self._member.check(self.generation)
        self._member.step = self.step + 1
        self._member.tell(StepBegun(context.worker, self.generation, self.step + 1))
        context.faults.point("begin", rank=self.rank, step=self.step + 1)

    def finished(self, state: RankState, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """Optimizer step `step` is done: into memory with it, then the others are told."""
        self.step = step
        self.capture(state)
        self._member.tell(StepFinished(self._member.context.worker, self.generation, step, seconds, metrics))
        if self._uploader is not None:
            self._uploader.captured(Step(step))

    def failed(self, state: RankState, problem: BaseException) -> None:
        """An exception left the user's step. Returns when the step can run again.

        Raises:
            Unwound: the run ends with it.
        """
        if not isinstance(problem, GenerationOver):
            self.report_failure(problem)
            self._member.await_verdict(self.generation)
        self.recover(state)

    def finish(self, state: RankState) -> bool:
        """Waits until every rank has done its last step; False if a fault sent this one back."""
        self._member.answer(StepsDone(self._member.context.worker, self.generation, self.step))
        try:
            self._member.await_of_generation(self.generation, Finish)
        except GenerationOver:
            self.recover(state)
            return False
        return True

    def _take_and_settle(self, join: Join, state: RankState) -> None:
        self.take(join)
        self.settle(state)

    def _try(self, act: Any, generation: int) -> bool:
        """Runs `act`; False when its generation is over. What went wrong otherwise is reported, not raised."""
        try:
            act()
        except GenerationOver:
            return False
        except Exception as problem:  # noqa: BLE001  # a peer's death shows in many ways; the coordinator judges
            self.report_failure(problem)
            self._member.await_verdict(generation)
            return False
        return True

    def report_failure(self, problem: BaseException) -> None:
        """Tells the coordinator that this member cannot go on, and lets go of what the traceback holds."""
        text = "".join(traceback.format_exception(problem))
        print(text, file=sys.stderr, flush=True)  # the log of this rank
        worker, kind, message = self._member.context.worker, type(problem).__name__, one_line(problem)
        now = SYSTEM_CLOCK.wall()
        if isinstance(problem, ConfigError):
            # It cannot work, however often it is tried; unless a peer's death turns out to be behind it.
            fact: Fact = TrainFailed(worker, self.generation, kind, message, text, now)
        else:
            fact = StepFailed(
                worker, self.generation, self.step, from_collective(problem), kind, message, text, now
            )
        self._member.tell(fact)

    def _offer(self) -> dict[int, ManifestRef | None]:
        """What this rank can restore, newest first: steps in memory (None), then committed ones in the store."""
        assert self._snapshots is not None
        assert self.rank is not None
        offers: dict[int, ManifestRef | None] = {int(step): None for step in self._snapshots.steps()}
        try:
            head = read_head(self._store)
            if head is not None:
                # Only what was committed: manifests newer than the head may be of a timeline that was undone.
                older = stored_steps(self._store, Rank(self.rank), self._member.context.signing_key)
                for ref in (head.refs[self.rank], *(ref for ref in older if ref.step < head.step)):
                    offers.setdefault(int(ref.step), ref)
        except (StoreError, CheckpointError) as problem:
            print(f"rank {self.rank}: the store offers nothing: {problem}", flush=True)
        return dict(sorted(offers.items(), reverse=True))

    def _restore(self, order: RestoreFrom, state: RankState, refs: dict[int, ManifestRef | None]) -> None:
        worker, step = self._member.context.worker, order.step
        if self._restored is not None and self._restored.step == step:
            self._member.tell(self._restored)  # ordered again by a controller that came back
            return
        if order.scratch:
            self._start(state)
            source = "start"
        else:
            found, source = self._read_or_tell(step, refs)
            # Loading is collective: none may begin it for a step that another cannot read.
            if not self._agree(found is not None, step) or found is None:
                return
            self._load(step, state, found, source)
        self._member.step = self.step
        self._restored = Restored(worker, self.generation, step, source, dict(self._phases))
        self._member.answer(self._restored)

    def _read_or_tell(self, step: int, refs: dict[int, ManifestRef | None]) -> tuple[State | None, str]:
        try:
            with self._phase("read"):
                return self._read(step, refs)
        except (StoreError, CheckpointError) as problem:
            refs.pop(step, None)
            worker = self._member.context.worker
            print(f"rank {self.rank}: step {step} is not restored: {problem}", flush=True)
            self._member.tell(RestoreFailed(worker, self.generation, step, str(problem)))
            return None, ""

    def _agree(self, able: bool, step: int) -> bool:
        assert self._group is not None
        with self._phase("agree"):
            return self._group.all_able(able, step)

    def _load(self, step: int, state: RankState, found: State, source: str) -> None:
        assert self._snapshots is not None
        self._member.context.faults.point("restore", rank=self.rank, step=step)
        with self._phase("restore"):
            state.load(self.engine, found)
        self._snapshots.forget_after(Step(step))
        self.step = step
        if source != "memory":
            self.capture(state)

    def _read(self, step: int, refs: dict[int, ManifestRef | None]) -> tuple[State, str]:
        assert self._snapshots is not None
        ref = refs.get(step)
        if ref is None:
            return self._snapshots.read(Step(step)), "memory"
        return read_state(self._store, ref, self._member.context.signing_key), "store"

    def _start(self, state: RankState) -> None:
        """Where the user's code stands: the same on whichever worker, for all were seeded alike."""
        context = self._member.context
        seed_everything(derive_seed(context.seed, "rank", self.rank or 0))
        self.step = 0
        # No step may begin before every rank could come back to its beginning.
        self.capture(state)

    def capture(self, state: RankState) -> None:
        """Copies the state after `self.step` into memory that outlives this process."""
        assert self._snapshots is not None
        context = self._member.context
        sources, scalars = state.gather(self.engine, self.step)
        self._snapshots.capture(
            step=Step(self.step),
            generation=Generation(self.generation),
            sources=sources,
            scalars=scalars,
            rank=Rank(self.rank or 0),
            faults=context.faults,
        )
        context.faults.point("captured", rank=self.rank, step=self.step)

    def _uploaded(self, outcome: Outcome) -> None:
        # On the uploader's thread.
        worker = self._member.context.worker
        if isinstance(outcome, Stored):
            ref = outcome.ref
            self._member.tell(
                ManifestStored(
                    worker, ref.generation, ref.rank, ref.step, ref.key, outcome.nbytes, outcome.seconds
                )
            )
            return
        failed = isinstance(outcome, Failed)
        reason = str(outcome.error) if isinstance(outcome, Failed) else outcome.reason
        self._member.tell(UploadMissed(worker, self.generation, outcome.step, reason, failed))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = SYSTEM_CLOCK.monotonic()
        try:
            yield
        finally:
            self._phases[name] = SYSTEM_CLOCK.monotonic() - begun
