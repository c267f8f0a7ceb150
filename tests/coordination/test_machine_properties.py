"""Whatever the world does, the promises hold: `World._check` and `validate` ask after each event.

At the end of every story the adversary stops, and the run must step again or end with a reason.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from resilient_sdk.events import Beat
from tests.coordination.world import World

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
WHO = st.integers(0, 30)


class Unordered(RuleBasedStateMachine):
    """Nobody fails, but nothing arrives when it should, and the controller and its connection come and go."""

    world: World

    @initialize(
        nproc=st.integers(1, 3),
        standbys=st.integers(0, 2),
        restarts=st.integers(0, 9),
        rounds=st.integers(0, 12),
        last_step=st.integers(2, 40),
    )
    def begin(self, nproc: int, standbys: int, restarts: int, last_step: int, rounds: int) -> None:
        self.world = World(nproc, standbys, restarts, last_step)
        self.world.flow(rounds)

    def someone(self, who: int) -> int:
        """A worker that was ordered, the newer ones as likely as the older."""
        return who % len(self.world.state.workers)

    def living(self, who: int, mode: str = "") -> int | None:
        alive = [w.number for w in self.world.workers.values() if w.alive and (not mode or w.mode == mode)]
        return alive[who % len(alive)] if alive else None

    # ---- the world's own ways: late, and out of order between workers ----

    @rule(rounds=st.integers(1, 8), first=st.integers(0, 8))
    def all_goes_well_for_a_while(self, rounds: int, first: int) -> None:
        self.world.flow(rounds, first)

    @rule(what=st.sampled_from(["all_orders_arrive", "all_act", "all_facts_arrive"]), first=st.integers(0, 8))
    def half_of_it_goes_well(self, what: str, first: int) -> None:
        getattr(self.world, what)(first)

    @rule(whos=st.lists(WHO, min_size=1, max_size=6))
    def orders_arrive(self, whos: list[int]) -> None:
        for who in whos:
            self.world.deliver_down(self.someone(who))

    @rule(whos=st.lists(WHO, min_size=1, max_size=6))
    def facts_arrive(self, whos: list[int]) -> None:
        for who in whos:
            self.world.deliver_up(self.someone(who))

    @rule(whos=st.lists(WHO, min_size=1, max_size=6))
    def workers_act(self, whos: list[int]) -> None:
        for who in whos:
            self.world.act(self.someone(who))

    @rule(who=WHO, fails=st.booleans())
    def an_upload_ends(self, who: int, fails: bool) -> None:
        self.world.upload(self.someone(who), fails=fails)

    # ---- the controller and its connection ----

    @rule(repeated=st.integers(0, 12))
    def the_controller_is_killed(self, repeated: int) -> None:
        self.world.restart(repeated)

    @rule(repeated=st.integers(0, 12))
    def the_connection_breaks(self, repeated: int) -> None:
        self.world.reconnect(repeated)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        # No fault, no recovery: what was lost was told again, and nobody had to be taken for hung.
        self.world.settle(steps=2 * self.world.last_step)
        assert self.world.state.outcome == "finished"
        assert self.world.state.generation == 1


class Adversary(Unordered):
    """And everything that can fail does."""

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    # ---- faults ----

    @rule(who=WHO, code=st.sampled_from([None, None, None, 0, 1, 75]))
    def a_worker_dies(self, who: int, code: int | None) -> None:
        if (number := self.living(who)) is not None:
            self.world.die(number, code)

    @rule(who=WHO, at_once=st.integers(2, 4))
    def several_die_at_once(self, who: int, at_once: int) -> None:
        for _ in range(at_once):
            self.a_worker_dies(who, None)

    @rule(who=WHO, beats=st.booleans())
    def a_worker_hangs(self, who: int, beats: bool) -> None:
        if (number := self.living(who)) is not None:
            worker = self.world.workers[number]
            worker.stuck, worker.hung = beats and not worker.paused, not beats

    @rule(who=WHO, collective=st.booleans(), message=st.sampled_from(["boom", "bang"]))
    def a_step_fails(self, who: int, collective: bool, message: str) -> None:
        if (number := self.living(who, "stepping")) is not None:
            self.world.fail(number, collective=collective, message=message)

    @rule(who=WHO)
    def a_member_pauses(self, who: int) -> None:
        if (number := self.living(who, "stepping")) is not None:
            self.world.pause(number, paused=True)

    @rule(who=WHO)
    def a_member_returns_early(self, who: int) -> None:
        if (number := self.living(who, "stepping")) is not None:
            self.world.return_from_train(number)

    @rule(rank=st.integers(0, 2), back=st.integers(0, 2))
    def a_snapshot_is_damaged(self, rank: int, back: int) -> None:
        world = self.world
        rank %= world.nproc
        steps = sorted(world.memory[rank], reverse=True)
        if back < len(steps):
            world.corrupt.add((rank, steps[back]))
            world.corrupt_ever = True

    @rule(who=WHO, rank=st.integers(0, 2))
    def a_worker_dies_and_the_newest_snapshot_is_damaged(self, who: int, rank: int) -> None:
        self.a_worker_dies(who, None)
        self.a_snapshot_is_damaged(rank, 0)

    # ---- what comes late, and what comes too late ----

    @rule(seconds=st.sampled_from([1.0, 5.0, 1000.0]), repeated=st.integers(0, 12))
    def the_controller_is_gone_for_long(self, seconds: float, repeated: int) -> None:
        self.world.now += seconds
        self.world.tick()
        self.world.restart(repeated)

    @precondition(lambda self: self.world.state.generation > 1)
    @rule(which=st.integers(0, 1000))
    def a_fact_of_an_older_generation_comes_late(self, which: int) -> None:
        world = self.world
        stale = [
            fact
            for fact in world.heard
            if 0 < getattr(fact, "generation", 0) < world.state.generation
            and hasattr(fact, "worker")
            and not isinstance(fact, Beat)
        ]
        if stale:
            before = {**world.state.record(), "awake_at": 0.0}
            world.handle(stale[which % len(stale)])
            after = {**world.state.record(), "awake_at": 0.0}
            assert after == before

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestUnordered = Unordered.TestCase
TestUnordered.settings = settings(settings.get_profile("ci"), max_examples=60)
TestAdversary = Adversary.TestCase
TestAdversary.settings = settings.get_profile("ci")
