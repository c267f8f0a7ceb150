"""The job, as the user's code sees it: an engine that survives its peers, and steps that can be undone."""

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from resilient_sdk.clock import SYSTEM_CLOCK
from resilient_sdk.coordination.commands import Join
from resilient_sdk.errors import ConfigError, one_line
from resilient_sdk.events import DeadlinePaused, StandbyReady
from resilient_sdk.training import engine as engines
from resilient_sdk.training.alone import LoneSeat
from resilient_sdk.training.blame import from_collective
from resilient_sdk.training.data import EndOfData, open_feed
from resilient_sdk.training.engine import EngineSpec
from resilient_sdk.training.group import export_rank
from resilient_sdk.training.member import Member, Unwound
from resilient_sdk.training.rank_state import RankState, Stateful
from resilient_sdk.training.rng import isolated_rng, seed_everything
from resilient_sdk.training.seat import Seat
from resilient_sdk.training.stand_in import Engine
from resilient_sdk.training.step import Step
from resilient_sdk.training.unranked import Guard, NeedsRank, hide_rank


class Place(Protocol):
    """What a job sits on: a seat in a coordinated run, or a lone one."""

    @property
    def rank(self) -> int | None: ...
    @property
    def step(self) -> int: ...
    @property
    def engine(self) -> Any: ...
    def open(self, state: RankState) -> None: ...
    def begun(self) -> None: ...
    def finished(self, state: RankState, step: int, seconds: float, metrics: dict[str, float]) -> None: ...
    def failed(self, state: RankState, problem: BaseException) -> None: ...
    def finish(self, state: RankState) -> bool: ...
    def close(self) -> None: ...


class Job:
    """One worker's part of a run. Made by the SDK: `train(job)` gets it, a script asks `rs.job()` for it.

    Before the first step Python's, NumPy's and torch's generators are seeded alike on every rank; from the first
    step on each rank has its own stream. Both follow from the run's seed, and the state of all of them is part
    of every snapshot.

    Attributes:
        world_size: number of ranks.
        seed: the run's seed.
        run_id: the run's id; "alone" for a script that was started with plain `python`.
    """

    def __init__(self, member: Member | None, join: Join | None, *, seed: int = 0) -> None:
        self._member = member
        self._join = join
        self._spec: EngineSpec | None = None
        self._place: Place | None = None
        self._state: RankState | None = None
        self._registered: dict[str, Stateful] = {}
        self._micro = 0
        self._began = 0.0
        self._ended = False
        self._caught: BaseException | None = (
            None  # left a collective in this block; the user may have caught it
        )
        self._guard: Guard | None = None
        self.seed = member.context.seed if member is not None else seed
        self.world_size = member.context.nproc if member is not None else 1
        self.run_id = member.context.run if member is not None else "alone"
        seed_everything(self.seed)
        if join is not None:
            export_rank(join.rank, join.world_size)
        elif member is not None:
            hide_rank(self.world_size)
            self._guard = Guard(engines.rank_modules(), self.world_size)

    # ---- the user's ----

    @property
    def rank(self) -> int:
        """This worker's rank, 0 … world_size - 1.

        A standby has none before it is promoted. Asking there never gives a wrong number and never blocks: it
        ends the standby's warm-up at that line, and when the standby is promoted the code runs from the top
        with its rank. That costs warmth, so ask inside the steps (`with step as batch:`) where you can: there
        it ends only the rehearsal. `run.status()` tells which standbys are warm, and which line it was.

        Who asks elsewhere gets no wrong number either: in a standby torch.distributed.get_rank(), DeepSpeed's
        and engine.global_rank do the same as this; RANK and LOCAL_RANK in the environment are no numbers (in
        the rehearsed step LOCAL_RANK is the device's); get_world_size() and WORLD_SIZE are the job's.
        """
        if self._place is not None and self._place.rank is not None:
            return self._place.rank
        if self._join is not None:
            return self._join.rank
        if self._member is None:
            return 0
        raise NeedsRank("job.rank was read")

    @property
    def is_standby(self) -> bool:
        """Whether this worker has no rank yet: it warms up, and what it computes is thrown away."""
        return not self.has_rank

    @property
    def device(self) -> torch.device:
        """Where this worker's tensors go: its CUDA device, else the CPU."""
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    def initialize(self, **arguments: Any) -> Engine:
        """Takes deepspeed.initialize's keyword arguments; returns the engine.

        `model` may be a function that returns the model, and must be one for ZeRO-3. `optimizer` and
        `lr_scheduler`, if given, are functions (of the parameters; of the optimizer). `training_data` is given
        to `job.steps` instead.

        Raises:
            ConfigError: what cannot be restored bit for bit, or what DeepSpeed does not know; nothing was built.
        """
        if self._place is not None:
            raise ConfigError("job.initialize was called twice", fix="One engine a job.")
        spec = self._spec = EngineSpec.from_arguments(**arguments)
        if self._member is None:
            self._place = LoneSeat(spec, self.seed)
        else:
            seat = Seat(self._member, spec)
            self._place = seat
            if self._join is not None:
                seat.begin(self._join)
            else:
                seat.rehearse()
        return Engine(self)

    def register(self, name: str, part: Stateful) -> None:
        """Makes an object of the user's part of the state: saved after each step, restored with the rest.

        It has `state_dict()` and `load_state_dict()`. Register before `job.steps`, the same names on every rank.
        """
        if self._state is not None:
            raise ConfigError(
                f"{name!r} was registered after job.steps() had begun", fix="Register it before."
            )
        RankState(_no_feed, registered=self._registered).register(name, part)

    def steps(self, loader: Any, *, until: int | None = None, epochs: int | None = None) -> Iterator[Step]:
        """Serves micro-batches until `until` optimizer steps are done, or `epochs` passes (default: one).

        Each iteration is one micro-batch: `with step as batch:` runs forward, `engine.backward` and
        `engine.step`. Everything of the loop belongs into the block. After a fault the block is left, the state
        is that of the last finished step, and the whole window of the failed step's micro-batches comes again.

        `loader` is a Dataset, DataLoader, StatefulDataLoader, iterable of micro-batches, or a function
        (rank, world_size) that makes one of them; see `resilient_sdk.training.data.open_feed` for what each
        guarantees. For its rehearsal a standby calls such a function with rank 0.

        Raises:
            ConfigError: called before `initialize` or twice, an unusable loader, a body without `engine.step()`.
        """
        self._open(loader, until, epochs)
        assert self._place is not None
        assert self._state is not None
        try:
            if isinstance(self._place, Seat) and self._join is None:
                yield from self._rehearsal(loader, self._place)
            else:
                self._place.open(self._state)
            yield from self._loop(until)
        finally:
            self._state.close()

    @contextmanager
    def no_deadline(self) -> Iterator[None]:
        """For something long outside the steps (an evaluation): nobody is taken for hung meanwhile."""
        self._pause(paused=True)
        try:
            yield
        finally:
            self._pause(paused=False)

    # ---- the worker's ----

    @property
    def has_rank(self) -> bool:
        """Whether this worker owns a rank; asking is harmless."""
        return self._member is None or self._join is not None or self._generation() > 0

    @property
    def looped(self) -> bool:
        """Whether the user's code came to its steps."""
        return self._state is not None

    @property
    def generation(self) -> int:
        """The membership that this worker acts for; 0 before any."""
        return self._generation() or (self._join.generation if self._join is not None else 0)

    def _generation(self) -> int:
        return self._place.generation if isinstance(self._place, Seat) else 0

    @property
    def present(self) -> Any:
        """DeepSpeed's own engine of this generation."""
        if self._place is None or self._place.engine is None:
            raise RuntimeError("there is no engine now: the job was closed")
        return self._place.engine

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what leaves a collective: who catches it goes on with a step that is broken."""
        try:
            yield
        except Exception as problem:
            if from_collective(problem):
                self._caught = problem
            raise

    def of_the_group(self, name: str) -> Any:
        """What an engine of the whole job would answer, while this worker's own is a rehearsal's."""
        assert self._spec is not None
        if name in ("world_size", "dp_world_size"):
            return self.world_size
        if name == "train_batch_size":
            sizes = (
                self._spec.micro_batch_size(self.world_size),
                self._spec.accumulation_steps(self.world_size),
            )
            return lambda: sizes[0] * sizes[1] * self.world_size
        if name == "gradient_accumulation_steps":
            return lambda: self._spec.accumulation_steps(self.world_size)
        raise NeedsRank(f"engine.{name} was read")

    def close(self) -> None:
        """Lets go of the engine, the group, uploads and the data. What is in memory stays there."""
        self._end_guard()
        if self._state is not None:
            self._state.close()
        if self._place is not None:
            self._place.close()
            self._place = None

    # ---- the loop ----

    def _open(self, loader: Any, until: int | None, epochs: int | None) -> None:
        spec = self._spec
        if spec is None:
            raise ConfigError("job.steps was called before job.initialize", fix="Initialize first.")
        if self._state is not None:
            raise ConfigError(
                "job.steps was called twice", fix="One loop a job; give it all steps by until=."
            )
        if until is not None and until < 1:
            raise ConfigError(f"until = {until}", fix="Give the number of optimizer steps, 1 or more.")
        passes = epochs if epochs is not None or until is not None else 1
        micro_batch_size = spec.micro_batch_size(self.world_size)

        def open_rank(rank: int) -> Any:
            return open_feed(
                loader,
                rank=rank,
                world_size=self.world_size,
                micro_batch_size=micro_batch_size,
                seed=self.seed,
                epochs=passes,
            )

        self._state = RankState(open_rank, registered=self._registered)

    def _loop(self, until: int | None) -> Iterator[Step]:
        place, state = self._place, self._state
        assert place is not None
        assert state is not None
        while True:
            if self._ended or (until is not None and place.step >= until):
                if place.finish(state):
                    return
                self._again()
                continue
            step = self._next()
            if step is not None:
                yield step
                if not step.entered:
                    raise ConfigError(
                        "a step was not entered", fix="Write `with step as batch:` in the loop's body."
                    )

    def _next(self) -> Step | None:
        place, state = self._place, self._state
        assert place is not None
        assert state is not None
        try:
            if self._micro == 0:
                self._began = SYSTEM_CLOCK.monotonic()
                place.begun()
            batch = state.draw()
        except EndOfData:
            self._ended = True
            return None
        except Exception as problem:  # noqa: BLE001  # the user's data code: as any failure inside a step
            self._fail(problem)
            return None
        return Step(place.step, self._micro, batch, self._leave)

    def _leave(self, step: Step, problem: BaseException | None) -> bool:
        caught, self._caught = self._caught, None
        if problem is None and caught is not None:
            # The user's code has caught it, and its step is half of one.
            self._fail(caught)
            return False
        if problem is None:
            try:
                self._complete(step)
            except Exception as late:  # noqa: BLE001  # a peer's death may show only here
                self._fail(late)
            else:
                step.committed = True
            return False
        if not isinstance(problem, Exception):
            return False
        self._fail(problem)
        return True

    def _complete(self, step: Step) -> None:
        place, state = self._place, self._state
        assert place is not None
        assert state is not None
        done: int = place.engine.global_steps
        if done == place.step:
            self._require_micro_step(place)
            self._micro += 1
            return
        self._micro = 0
        place.finished(state, done, SYSTEM_CLOCK.monotonic() - self._began, step.metrics)

    def _require_micro_step(self, place: Place) -> None:
        accumulation = place.engine.gradient_accumulation_steps()
        if (
            place.engine.micro_steps % accumulation != (self._micro + 1) % accumulation
            or self._micro + 1 == accumulation
        ):
            raise ConfigError(
                "the step's body did not call engine.step()",
                fix="Call engine.backward(loss) and engine.step() in every `with step` block.",
            )

    def _fail(self, problem: BaseException) -> None:
        assert self._place is not None
        assert self._state is not None
        self._place.failed(self._state, problem)
        self._again()

    def _again(self) -> None:
        self._micro, self._ended, self._caught = 0, False, None

    def _pause(self, *, paused: bool) -> None:
        if self._member is not None and isinstance(self._place, Seat) and self._place.rank is not None:
            self._member.tell(DeadlinePaused(self._member.context.worker, self._place.generation, paused))

    # ---- a standby ----

    def _rehearsal(self, loader: Any, seat: Seat) -> Iterator[Step]:
        """One step without a rank, undone; returns when the standby has been promoted and stands where all do."""
        if iter_is_one_shot(loader):
            self._wait_for_rank(
                seat, "its data is an iterator, which a rehearsal would use up; pass a function"
            )
            return
        assert self._state is not None
        feed = self._state.open(0)
        try:
            with isolated_rng():
                batch = feed.draw()
        finally:
            feed.close()
        step = Step(0, 0, batch, lambda _step, problem: self._rehearsed(seat, problem))
        seat.rehearse_step()
        yield step
        if not step.entered:
            raise ConfigError("a step was not entered", fix="Write `with step as batch:` in the loop's body.")

    def _rehearsed(self, seat: Seat, problem: BaseException | None) -> bool:
        if isinstance(problem, Unwound | KeyboardInterrupt):
            return False
        stepped = seat.engine.global_steps > 0
        note = "" if stepped or problem is None else f"its rehearsal ended early: {why(problem)}"
        # The waiting is done here, inside the block: what follows it in the loop must not run without a rank.
        self._wait_for_rank(seat, note)
        return True

    def _wait_for_rank(self, seat: Seat, note: str) -> None:
        assert self._member is not None
        assert self._state is not None
        seat.leave()
        hide_rank(self.world_size)
        seed_everything(self.seed)
        self._member.tell(StandbyReady(self._member.context.worker, warm=not note, note=note))
        seat.recover(self._state)
        self._end_guard()
        self._again()

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.end()
            self._guard = None


_NOT_THE_USERS = re.compile(
    r"[/\\]resilient_sdk[/\\](training|runtime)[/\\]|[/\\]site-packages[/\\]|^<frozen "
)


def iter_is_one_shot(loader: Any) -> bool:
    """Whether iterating `loader` uses it up."""
    return hasattr(loader, "__next__")


def why(problem: BaseException) -> str:
    """One line: what left the user's code, and from where in it."""
    where = ""
    for frame in traceback.extract_tb(problem.__traceback__):
        if not _NOT_THE_USERS.search(frame.filename):
            where = f" at {frame.filename}:{frame.lineno}"
    if isinstance(problem, NeedsRank):
        return f"{problem}{where}"
    return f"{type(problem).__name__}: {one_line(problem)}{where}"


def _no_feed(_rank: int) -> Any:
    raise AssertionError("no data yet")


# ---- the process's job ----

_current: list[Job] = []


def set_current(job: Job | None) -> None:
    """Makes `job` what `job()` returns in this process."""
    _current[:] = [] if job is None else [job]


def job() -> Job:
    """The job of a script. Under `resilient run` it is the run's; under plain `python` one rank on its own."""
    if not _current:
        print(
            "resilient_sdk: started without `resilient run`: one rank, no standby; a fault ends this run",
            file=sys.stderr,
        )
        _current.append(Job(None, None))
    return _current[0]
