"""What the coordinator promises, a promise a test. Workers 0, 1, 2 own ranks 0, 1, 2; worker 3 stands by."""

import json
from collections.abc import Callable

import pytest

from resilient_sdk.coordination.blame import MAX_RETRIES_IN_ROW
from resilient_sdk.coordination.commands import (
    EndRun,
    Finish,
    Go,
    Join,
    KillWorker,
    Leave,
    MoveHead,
    NoteHead,
    Release,
    RestoreFrom,
    StandBy,
    StartWorker,
    StoreSnapshot,
    Unwind,
)
from resilient_sdk.coordination.invariants import validate
from resilient_sdk.coordination.machine import Coordinator
from resilient_sdk.coordination.stall import SILENT_S, VERDICT_S
from resilient_sdk.coordination.state import Phase, Role, RunState
from resilient_sdk.errors import InvalidTransition
from resilient_sdk.events import (
    AgentJoined,
    Beat,
    DeadlinePaused,
    Fact,
    GenerationBroken,
    GenerationFormed,
    HeadMoved,
    ManifestStored,
    RankLost,
    RecoveryFinished,
    Restored,
    RestoreFailed,
    RunEnded,
    RunResumed,
    RunStarted,
    StandbyPromoted,
    StandbyReady,
    StepBegun,
    StepFailed,
    StepFinished,
    StepsDone,
    StepsOffered,
    StopRequested,
    TrainFailed,
    TrainReturned,
    UploadMissed,
    WorkerExited,
    WorkerStarted,
)
from tests.coordination.scene import (
    FLOOR_S,
    STARTUP_S,
    Scene,
    ended,
    finishing,
    forming,
    joining,
    only,
    recovering,
    restoring,
    stepping,
    told,
    twin,
)

PHASES: list[Callable[[], Scene]] = [forming, joining, restoring, stepping, recovering, finishing]


class TestFormation:
    def test_a_run_orders_all_its_workers_at_once(self) -> None:
        assert Scene().first == [StartWorker(0), StartWorker(1), StartWorker(2), StartWorker(3)]

    def test_a_run_starts_once(self) -> None:
        scene = stepping()
        assert scene.tell(RunStarted(3, 1, 5, FLOOR_S, STARTUP_S)) == []

    def test_the_first_n_workers_get_the_ranks_and_the_rest_stand_by(self) -> None:
        scene = Scene()
        assert scene.start(0, 1) == []
        assert scene.start(2) == [
            Join(0, 1, 0, 3, restores=False),
            Join(1, 1, 1, 3, restores=False),
            Join(2, 1, 2, 3, restores=False),
        ]
        assert scene.start(3) == [StandBy(3)]

    def test_a_worker_that_dies_before_it_was_told_anything_is_replaced(self) -> None:
        scene = Scene(standbys=0)
        scene.start(0)
        assert scene.die(0) == [StartWorker(3)]
        assert scene.start(1, 2, 3) == [
            Join(1, 1, 0, 3, restores=False),
            Join(2, 1, 1, 3, restores=False),
            Join(3, 1, 2, 3, restores=False),
        ]

    def test_a_run_that_finds_no_snapshot_starts_from_scratch(self) -> None:
        assert joining().offer() == [RestoreFrom(worker, 1, 0, scratch=True) for worker in range(3)]

    def test_a_run_that_finds_snapshots_goes_on_from_the_newest_that_all_have(self) -> None:
        scene = joining()
        scene.offer(9, 8, 7, ranks=[0])
        scene.offer(8, 7, ranks=[1])
        assert scene.offer(9, 8, ranks=[2]) == [
            RestoreFrom(worker, 1, 8, scratch=False) for worker in range(3)
        ]

    def test_go_waits_for_the_last_rank(self) -> None:
        scene = restoring()
        assert scene.restore(0, ranks=[0, 1, 1, 0]) == []
        out = scene.restore(0, ranks=[2])
        assert only(Go, out) == [Go(0, 1), Go(1, 1), Go(2, 1)]
        assert told(GenerationFormed, out) == [GenerationFormed(1, (0, 1, 2), 0, 0, {})]

    def test_workers_that_do_not_start_end_the_run(self) -> None:
        scene = Scene()
        scene.start(0)
        assert scene.wait(STARTUP_S - 1) == []
        end = ended(scene.wait(2))
        assert end.outcome == "no_standby"
        assert end.message.startswith("worker 1, 2, 3 did not start")


class TestRecovery:
    def test_a_killed_rank_is_taken_by_the_warm_standby_in_the_next_generation(self) -> None:
        scene = stepping(3)
        out = scene.die(1)
        assert told(RankLost, out) == [RankLost(1, 1, 1, "was killed by signal 9")]
        assert told(GenerationBroken, out) == [GenerationBroken(1, "rank 1 was killed by signal 9")]
        assert told(StandbyPromoted, out) == [StandbyPromoted(2, 1, 3, warm=True)]
        assert only(Leave, out) == [Leave(0, 1), Leave(2, 1)]
        assert only(Join, out) == [
            Join(0, 2, 0, 3, restores=True),
            Join(3, 2, 1, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
        ]
        assert not only(StartWorker, out)

    def test_everybody_leaves_before_anybody_joins(self) -> None:
        kinds = [type(command) for command in stepping(3).die(1) if isinstance(command, Leave | Join)]
        assert kinds == [Leave, Leave, Join, Join, Join]

    def test_no_finished_step_is_lost_when_all_have_it(self) -> None:
        scene = recovering(3)
        out = scene.recover(3)
        assert only(RestoreFrom, out) == [RestoreFrom(worker, 2, 3, scratch=False) for worker in (0, 3, 2)]
        assert told(GenerationFormed, out) == [GenerationFormed(2, (0, 3, 2), 3, 0, {"restore": 0.1})]

    def test_steps_that_are_run_again_are_counted_once_for_each_recovery(self) -> None:
        scene = recovering(3)
        assert told(GenerationFormed, scene.recover(1))[0].lost == 2
        assert told(RecoveryFinished, scene.run_step(2))[0].lost == 2
        scene.tell(HeadMoved(2, 2))
        scene.start(4)
        scene.ready(4)
        scene.die(0)
        scene.recover(2)
        assert told(RecoveryFinished, scene.run_step(3))[0].lost == 0
        assert scene.state.lost == 2

    def test_a_recovery_is_over_when_every_rank_has_finished_a_step(self) -> None:
        scene = recovering(3)
        scene.now += 0.4
        scene.recover(3)
        scene.begin(4)
        assert not told(RecoveryFinished, scene.finish(4, ranks=[0, 1]))
        [over] = told(RecoveryFinished, scene.finish(4, ranks=[2]))
        assert (over.generation, over.step) == (2, 4)
        assert over.seconds == pytest.approx(0.4)

    def test_the_new_standby_is_ordered_only_after_the_recovery(self) -> None:
        scene = recovering(3)
        assert not only(StartWorker, scene.recover(3))
        assert not only(StartWorker, scene.run_step(4))
        assert only(StartWorker, scene.tell(HeadMoved(2, 4))) == [StartWorker(4)]

    def test_the_new_standby_does_not_wait_for_a_store_that_is_behind(self) -> None:
        scene = recovering(3)
        scene.recover(3)
        scene.run_step(4)
        assert only(StartWorker, scene.run_step(5)) == [StartWorker(4)]

    def test_nothing_common_and_nothing_begun_starts_from_scratch(self) -> None:
        scene = restoring()
        scene.die(1)
        assert only(RestoreFrom, scene.offer()) == [RestoreFrom(w, 2, 0, scratch=True) for w in (0, 3, 2)]

    def test_nothing_common_though_steps_were_finished_ends_the_run_and_says_so(self) -> None:
        scene = recovering(3)
        scene.offer(3, 2, ranks=[0, 2])
        end = ended(scene.offer(1, ranks=[1]))
        assert (end.outcome, end.error["kind"]) == ("failed", "NothingToRestore")
        assert end.message == "no step is left that every rank can restore (step 3 was finished)"
        assert end.error["offers"] == {"0": [3, 2], "1": [1], "2": [3, 2]}

    def test_a_survivor_whose_model_may_have_changed_is_no_start_from_scratch(self) -> None:
        # Rank 0's optimizer may have run; only a snapshot undoes that.
        scene = stepping(0)
        scene.begin(1)
        scene.die(1)
        assert ended(scene.offer()).error["kind"] == "NothingToRestore"

    def test_what_cannot_be_read_gives_way_to_the_next_older_common_step(self) -> None:
        scene = recovering(3)
        scene.offer(3, 2, 1)
        scene.restore(3, ranks=[0])
        out = scene.tell(RestoreFailed(3, 2, 3, "corrupt in every copy"))
        assert out == [RestoreFrom(worker, 2, 2, scratch=False) for worker in (0, 3, 2)]
        assert scene.restore(3) == []
        assert scene.restore(2, ranks=[1, 2]) == []
        assert only(Go, scene.restore(2, ranks=[0])) == [Go(0, 2), Go(3, 2), Go(2, 2)]

    def test_an_unreadable_step_stays_out_when_the_offer_is_repeated(self) -> None:
        scene = recovering(3)
        scene.offer(3, 2, 1)
        scene.tell(RestoreFailed(3, 2, 3, "corrupt"))
        assert scene.offer(3, 2, 1) == []
        assert only(RestoreFrom, scene.tell(RestoreFailed(3, 2, 2, "corrupt")))[0].step == 1

    def test_the_last_readable_step_gone_ends_the_run(self) -> None:
        scene = recovering(3)
        scene.offer(3)
        assert ended(scene.tell(RestoreFailed(3, 2, 3, "corrupt"))).error["kind"] == "NothingToRestore"

    def test_death_before_the_first_step_goes_back_to_the_start(self) -> None:
        scene = stepping(0)
        scene.begin(1)
        scene.die(1)
        out = scene.recover(0)
        assert only(RestoreFrom, out)[0] == RestoreFrom(0, 2, 0, scratch=False)
        assert told(GenerationFormed, out)[0].lost == 0


class TestSeveralFaults:
    def test_two_ranks_at_once_take_two_standbys(self) -> None:
        scene = stepping(3, standbys=2)
        scene.die(1, 2)
        assert scene.state.owners == [0, 3, 4]
        assert scene.generation == 3
        assert only(Go, scene.recover(3)) == [Go(0, 3), Go(3, 3), Go(4, 3)]

    def test_two_ranks_at_once_with_one_standby_wait_for_a_new_worker(self) -> None:
        scene = stepping(3)
        out = scene.die(1, 2)
        assert scene.state.phase == Phase.FORMING
        assert only(StartWorker, out) == [StartWorker(4)]
        assert only(Join, scene.start(4)) == [
            Join(0, 3, 0, 3, restores=True),
            Join(3, 3, 1, 3, restores=True),
            Join(4, 3, 2, 3, restores=True),
        ]

    def test_an_idle_standby_that_dies_disturbs_nobody_and_is_replaced(self) -> None:
        scene = stepping(3)
        assert scene.die(3) == [StartWorker(4)]
        assert scene.state.phase == Phase.STEPPING

    @pytest.mark.parametrize("scene", [joining, restoring], ids=["joining", "restoring"])
    def test_a_standby_that_dies_while_the_run_forms_is_replaced_when_it_steps(
        self, scene: Callable[[], Scene]
    ) -> None:
        run = scene()
        assert run.die(3) == []
        out = [] if run.state.phase == Phase.RESTORING else run.offer()
        assert only(StartWorker, out + run.restore(0)) == [StartWorker(4)]

    def test_a_standby_that_dies_in_a_recovery_is_replaced_after_it(self) -> None:
        scene = stepping(3, standbys=2)
        scene.die(1)
        assert scene.die(4) == []
        scene.recover(3)
        scene.run_step(4)
        assert only(StartWorker, scene.run_step(5)) == [StartWorker(5), StartWorker(6)]

    @pytest.mark.parametrize("offered", [False, True], ids=["joining", "restoring"])
    def test_a_promoted_standby_that_dies_before_it_stands_is_lost_like_any_rank(self, offered: bool) -> None:
        scene = recovering(3, standbys=2)
        if offered:
            scene.offer(3)
        out = scene.die(3)
        assert only(Leave, out) == [Leave(0, 2), Leave(2, 2)]
        assert only(Join, out) == [
            Join(0, 3, 0, 3, restores=True),
            Join(4, 3, 1, 3, restores=True),
            Join(2, 3, 2, 3, restores=True),
        ]

    def test_the_same_rank_three_times(self) -> None:
        scene = stepping(1)
        for number in (2, 3, 4):
            scene.die(scene.owner(1))
            scene.recover(number - 1)
            scene.run_step(number)
            [start] = only(StartWorker, scene.tell(HeadMoved(scene.generation, number)))
            scene.start(start.worker)
            scene.ready(start.worker)
        assert scene.state.history[1] == [1, 3, 4, 5]
        assert scene.state.recoveries == 3

    def test_without_a_standby_a_new_worker_is_ordered_at_once(self) -> None:
        scene = stepping(3, standbys=0)
        assert only(StartWorker, scene.die(1)) == [StartWorker(3)]
        assert only(Join, scene.start(3)) == [
            Join(0, 2, 0, 3, restores=True),
            Join(3, 2, 1, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
        ]

    def test_a_standby_that_still_warms_up_is_better_than_a_new_worker(self) -> None:
        scene = Scene()
        scene.start(0, 1, 2, 3)
        scene.offer()
        scene.restore(0)
        out = scene.die(1)
        assert Join(3, 2, 1, 3, restores=True) in out
        assert not only(StartWorker, out)

    def test_the_warm_standby_goes_first(self) -> None:
        scene = Scene(standbys=2)
        scene.start(0, 1, 2, 3, 4)
        scene.ready(3, warm=False)
        scene.ready(4)
        scene.offer()
        scene.restore(0)
        assert told(StandbyPromoted, scene.die(1)) == [StandbyPromoted(2, 1, 4, warm=True)]

    def test_no_standby_and_no_restart_left_ends_the_run(self) -> None:
        scene = stepping(3, standbys=0, max_restarts=0)
        out = scene.die(1)
        end = ended(out)
        assert (end.outcome, end.message) == ("no_standby", "no standby is left for rank 1")
        assert only(Unwind, out) == [Unwind(0, end.message), Unwind(2, end.message)]
        assert told(RunEnded, out) == [RunEnded("no_standby", end.message, {})]

    def test_ranks_that_die_before_any_step_is_finished_end_the_run(self) -> None:
        scene = stepping(3, max_restarts=50)
        out: list[object] = []
        for _ in range(6):
            dead = scene.owner(1)
            out += scene.die(dead)
            for worker in list(scene.state.workers):
                if worker.role == Role.ORDERED:
                    scene.start(worker.worker)
        assert scene.state.message == "6 ranks died in a row without a finished step"
        assert scene.state.outcome == "failed"


def stale_facts(worker: int, generation: int) -> list[Fact]:
    return [
        StepsOffered(worker, generation, (99,)),
        Restored(worker, generation, 0, "memory"),
        Restored(worker, generation, 3, "memory"),
        RestoreFailed(worker, generation, 3, "corrupt"),
        DeadlinePaused(worker, generation, paused=True),
        StepBegun(worker, generation, 9),
        StepFinished(worker, generation, 9, 0.1),
        StepFailed(worker, generation, 9, False, "ValueError", "boom", "", 0.0),
        TrainFailed(worker, generation, "ValueError", "boom", "", 0.0),
        StepsDone(worker, generation, 9),
        ManifestStored(worker, generation, 1, 4, "key", 1, 0.1),
        UploadMissed(worker, generation, 4, "full"),
    ]


class TestTheLateAndTheDead:
    @pytest.mark.parametrize("worker", [0, 1], ids=["survivor", "dead"])
    @pytest.mark.parametrize("phase", [Phase.JOINING, Phase.RESTORING, Phase.STEPPING, Phase.FINISHING])
    def test_facts_of_an_older_generation_change_nothing(self, worker: int, phase: Phase) -> None:
        scene = recovering(3)
        if phase != Phase.JOINING:
            scene.offer(3)
        if phase in (Phase.STEPPING, Phase.FINISHING):
            scene.restore(3)
        if phase == Phase.FINISHING:
            scene.done(3)
        assert scene.state.phase == phase
        before = scene.state.record()
        for fact in stale_facts(worker, 1):
            assert scene.tell(fact) == []
            assert scene.state.record() == before

    @pytest.mark.parametrize("worker", [1, 3], ids=["dead", "standby"])
    def test_whoever_owns_no_rank_is_not_heard(self, worker: int) -> None:
        scene = stepping(3, standbys=2)
        scene.die(1)
        scene.recover(3)
        speaker = worker if worker == 1 else 4
        before = scene.state.record()
        for fact in stale_facts(speaker, 2):
            assert scene.tell(fact) == []
        assert scene.state.record() == before

    def test_a_beat_of_the_old_group_is_a_life_sign_and_no_more(self) -> None:
        scene = recovering(3)
        scene.now += 1
        scene.tell(Beat(0, 1, 4, waiting=True))
        assert scene.state.workers[0].beat_at == scene.now
        assert not scene.state.workers[0].waiting

    def test_a_death_is_told_twice_and_counts_once(self) -> None:
        scene = recovering(3)
        assert scene.die(1) == []

    def test_steps_told_again_do_not_go_back(self) -> None:
        scene = stepping(3)
        before = scene.state.record()
        scene.finish(1)
        scene.begin(2)
        assert scene.state.record() == before

    def test_a_worker_that_was_given_up_and_lives_is_killed(self) -> None:
        scene = stepping(3)
        scene.rejoin(1)
        assert scene.tell(WorkerStarted(1, 101)) == [KillWorker(1)]
        assert KillWorker(1) in scene.tell(AgentJoined((0, 1, 2, 3)))

    def test_a_worker_that_nobody_ordered_is_a_defect(self) -> None:
        for number in (-1, 77):
            with pytest.raises(InvalidTransition, match="no worker"):
                stepping().c.handle(WorkerStarted(number, 1), 1000.0)

    def test_a_decision_of_the_coordinator_is_no_fact_for_it(self) -> None:
        with pytest.raises(InvalidTransition, match="RankLost"):
            stepping().c.handle(RankLost(1, 0, 0, ""), 1000.0)


class TestExceptions:
    def test_a_first_exception_re_forms_the_same_members(self) -> None:
        scene = stepping(3)
        assert scene.raises(1, 3) == []
        out = scene.wait(VERDICT_S)
        assert told(GenerationBroken, out) == [GenerationBroken(1, "rank 1 raised ValueError at step 3")]
        assert only(Leave, out) == [Leave(0, 1), Leave(1, 1), Leave(2, 1)]
        assert only(Join, out) == [
            Join(0, 2, 0, 3, restores=True),
            Join(1, 2, 1, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
        ]

    def test_the_same_exception_at_the_same_step_again_ends_the_run_with_the_first_traceback(self) -> None:
        scene = stepping(3)
        scene.raises(2, 3, at=5.0)
        scene.raises(1, 3, at=4.0)
        scene.wait(VERDICT_S)
        scene.recover(3)
        scene.raises(0, 3, at=9.0)
        end = ended(scene.wait(VERDICT_S))
        assert (end.outcome, end.message) == ("failed", "ValueError on rank 1 at step 3: boom")
        assert (end.error["rank"], end.error["traceback"]) == (1, "trace 1")

    def test_of_tracebacks_of_one_moment_the_lowest_rank_counts(self) -> None:
        scene = stepping(3)
        for _ in range(2):
            for rank in (2, 0, 1):
                out = scene.raises(rank, 3, at=4.0)
            if scene.state.phase == Phase.JOINING:
                scene.recover(3)
        assert ended(out).error["rank"] == 0

    def test_ranks_that_fail_alike_in_one_generation_get_their_second_chance(self) -> None:
        scene = stepping(3)
        for rank in range(3):
            scene.raises(rank, 3)
        assert scene.state.phase == Phase.JOINING

    def test_a_rank_that_fails_again_is_found_whoever_fails_first(self) -> None:
        scene = stepping(3)
        for order in ((0, 1, 2), (2, 1, 0)):
            for at, rank in enumerate(order):
                out = scene.raises(rank, 3, message=f"rank {rank}", at=float(at))
            if scene.state.phase == Phase.JOINING:
                scene.recover(3)
        assert ended(out).outcome == "failed"

    def test_an_exception_that_does_not_come_again_is_forgiven(self) -> None:
        scene = stepping(3)
        scene.raises(1, 3)
        scene.wait(VERDICT_S)
        scene.recover(3)
        scene.run_step(4)
        scene.raises(1, 4)
        scene.wait(VERDICT_S)
        assert scene.state.phase == Phase.JOINING

    def test_all_ranks_failing_need_no_waiting_for_a_verdict(self) -> None:
        scene = stepping(3)
        scene.raises(0, 3)
        scene.raises(1, 3)
        assert told(GenerationBroken, scene.raises(2, 3))

    def test_collective_failures_that_a_death_explains_are_forgotten(self) -> None:
        scene = stepping(3)
        scene.raises(0, 3, collective=True)
        scene.raises(2, 3, collective=True)
        assert told(GenerationBroken, scene.die(1)) == [GenerationBroken(1, "rank 1 was killed by signal 9")]
        scene.recover(3)
        assert not told(GenerationBroken, scene.wait(2 * VERDICT_S))
        assert scene.state.first_failures == []

    def test_a_users_exception_is_told_from_its_echoes_in_collectives(self) -> None:
        scene = stepping(3)
        scene.raises(0, 3, collective=True, at=1.0)
        scene.raises(1, 3, at=2.0)
        out = scene.raises(2, 3, collective=True, at=1.0)
        assert told(GenerationBroken, out)[0].cause == "rank 1 raised ValueError at step 3"

    def test_collective_failures_alone_re_form_and_then_end_the_run(self) -> None:
        scene = stepping(3)
        for _ in range(MAX_RETRIES_IN_ROW):
            scene.raises(0, 3, collective=True)
            scene.wait(VERDICT_S)
            scene.recover(3)
        scene.raises(0, 3, collective=True)
        end = ended(scene.wait(VERDICT_S))
        assert (end.outcome, end.error["kind"]) == ("failed", "RuntimeError")

    def test_a_finished_step_makes_up_for_the_retries_before_it(self) -> None:
        scene = stepping(3)
        for number in range(2 * MAX_RETRIES_IN_ROW):
            scene.raises(0, 3 + number, collective=True)
            scene.wait(VERDICT_S)
            scene.recover(3 + number)
            scene.run_step(4 + number)
        assert scene.state.phase == Phase.STEPPING

    def test_an_exception_outside_the_steps_ends_the_run_at_once(self) -> None:
        scene = stepping(3)
        assert scene.train_raises(1) == []
        end = ended(scene.wait(VERDICT_S))
        assert end.message == "KeyError on rank 1 at step 3: lost"

    def test_an_exception_outside_the_steps_that_a_death_explains_costs_a_worker_and_no_more(self) -> None:
        scene = stepping(3, standbys=2)
        scene.train_raises(0)
        scene.die(1)
        scene.die(0, code=75)
        assert scene.state.owners == [4, 3, 2]
        assert scene.state.first_failures == []

    def test_an_exception_after_the_last_step_ends_the_run_with_it(self) -> None:
        assert ended(finishing(3).train_raises(2)).message == "KeyError on rank 2 at step 3: lost"


class TestExits:
    @pytest.mark.parametrize("code", [0, 1])
    def test_an_exit_in_the_middle_is_a_lost_rank_and_twice_at_the_same_step_a_failure(
        self, code: int
    ) -> None:
        scene = stepping(3)
        scene.begin(4)
        out = scene.die(1, code=code)
        assert told(RankLost, out)[0].cause == f"exited with status {code}"
        assert Join(3, 2, 1, 3, restores=True) in out
        scene.recover(3)
        scene.begin(4)
        end = ended(scene.die(3, code=code))
        assert (end.outcome, end.message) == ("failed", f"rank 1 exited with status {code} at step 4, twice")

    def test_two_ranks_that_exit_at_once_have_done_it_once(self) -> None:
        scene = stepping(3, standbys=2)
        scene.begin(4)
        scene.die(0, 1, code=1)
        assert scene.state.owners == [3, 4, 2]

    def test_a_worker_thrown_out_by_a_peers_death_has_not_failed(self) -> None:
        scene = stepping(3, standbys=3)
        for worker in (1, 3, 4):
            scene.die(worker, code=75)
            scene.recover(3)
        assert scene.state.phase == Phase.STEPPING

    def test_returning_together_before_the_loops_end_finishes_the_run(self) -> None:
        scene = stepping(3)
        for worker in (0, 1, 2):
            out = scene.tell(TrainReturned(worker), WorkerExited(worker, 0, None, 0.0))
        assert (ended(out).outcome, ended(out).message) == ("finished", "finished at step 3")

    def test_a_rank_that_returned_alone_gets_a_new_owner_when_its_generation_breaks(self) -> None:
        scene = stepping(3)
        scene.tell(TrainReturned(0), WorkerExited(0, 0, None, 0.0))
        out = scene.die(1)
        assert only(StartWorker, out) == [StartWorker(4)]
        scene.start(4)
        assert scene.state.owners == [3, 4, 2]

    @pytest.mark.parametrize("offered", [False, True], ids=["joining", "restoring"])
    def test_a_worker_that_returned_as_its_generation_broke_is_lost_to_the_next(self, offered: bool) -> None:
        scene = stepping(3, standbys=2)
        scene.tell(TrainReturned(0))
        scene.die(1)
        if offered:
            scene.offer(3)
        assert Join(4, 3, 0, 3, restores=True) in scene.die(0, code=0)


class TestStalls:
    def test_a_silent_member_is_killed_and_replaced(self) -> None:
        scene = stepping(3)
        scene.begin(4)
        out = scene.wait(FLOOR_S, silent=[1], waiting=[0, 2])
        assert only(KillWorker, out) == [KillWorker(1)]
        lost = told(RankLost, scene.die(1))
        assert [fact.cause for fact in lost] == [f"rank 1 gave no sign of life for {SILENT_S:g} s"]

    def test_the_floor_is_honoured(self) -> None:
        scene = stepping(3)
        scene.begin(4)
        assert scene.wait(FLOOR_S - 0.5, silent=[1], waiting=[0, 2]) == []
        assert scene.state.step_seconds() == pytest.approx(0.1)

    def test_a_step_may_take_ten_times_its_median(self) -> None:
        scene = stepping(0)
        for number in (1, 2, 3):
            scene.begin(number)
            scene.finish(number, seconds=2.0)
        scene.begin(4)
        assert scene.wait(19.5, waiting=[0, 2]) == []
        assert only(KillWorker, scene.wait(1, waiting=[0, 2])) == [KillWorker(1)]

    def test_who_stands_outside_the_collective_that_its_peers_wait_in_is_killed(self) -> None:
        scene = stepping(3)
        scene.begin(4)
        assert only(KillWorker, scene.wait(FLOOR_S, waiting=[0, 2])) == [KillWorker(1)]
        assert told(RankLost, scene.die(1))[0].cause == f"rank 1 held its peers up for {FLOOR_S:.1f} s"

    def test_who_has_not_begun_the_step_its_peers_are_in_is_killed(self) -> None:
        scene = stepping(3)
        scene.begin(4, ranks=[0, 2])
        assert only(KillWorker, scene.wait(FLOOR_S, waiting=[0, 1, 2])) == [KillWorker(1)]

    def test_a_stall_without_a_culprit_forms_the_generation_again_and_then_ends_the_run(self) -> None:
        scene = stepping(3)
        for _ in range(MAX_RETRIES_IN_ROW):
            out = scene.wait(FLOOR_S, waiting=[0, 1, 2])
            assert only(Join, out) == [
                Join(worker, scene.generation, worker, 3, restores=True) for worker in range(3)
            ]
            scene.recover(3)
        end = ended(scene.wait(FLOOR_S, waiting=[0, 1, 2]))
        assert (end.outcome, end.error) == ("failed", {"kind": "Stalled"})

    def test_when_nobody_at_all_is_heard_nobody_is_killed(self) -> None:
        # It is the connection, and what is known of who waits is old.
        scene = stepping(3)
        scene.wait(1, waiting=[0, 2])
        out = scene.wait(FLOOR_S, silent=[0, 1, 2, 3])
        assert not only(KillWorker, out)
        assert told(GenerationBroken, out)[0].cause.startswith("no worker gave a sign of life")

    def test_the_only_rank_is_known_to_be_silent_by_its_standby(self) -> None:
        scene = stepping(3, nproc=1)
        assert only(KillWorker, scene.wait(FLOOR_S, silent=[0])) == [KillWorker(0)]

    def test_a_culprit_is_named_again_only_when_its_kill_shows_no_effect(self) -> None:
        scene = stepping(3)
        scene.begin(4)
        out = scene.wait(2 * FLOOR_S + 1, silent=[1], waiting=[0, 2])
        assert only(KillWorker, out) == [KillWorker(1), KillWorker(1)]

    def test_a_pause_stops_the_clock_for_all(self) -> None:
        scene = stepping(3)
        scene.tell(DeadlinePaused(1, 1, paused=True))
        assert scene.wait(10 * STARTUP_S, waiting=[0, 2]) == []
        scene.tell(DeadlinePaused(1, 1, paused=False))
        assert scene.wait(FLOOR_S - 0.5, waiting=[0, 2]) == []
        assert only(KillWorker, scene.wait(1, waiting=[0, 2])) == [KillWorker(1)]

    def test_a_pause_does_not_hide_a_peer_that_is_silent(self) -> None:
        scene = stepping(3)
        scene.tell(DeadlinePaused(1, 1, paused=True))
        assert only(KillWorker, scene.wait(2 * FLOOR_S, silent=[0]))[0] == KillWorker(0)

    def test_a_pause_may_hold_the_life_signs_up_as_long_as_a_start(self) -> None:
        scene = stepping(3)
        scene.tell(DeadlinePaused(1, 1, paused=True))
        assert scene.wait(STARTUP_S - 1, silent=[1]) == []
        assert only(KillWorker, scene.wait(2, silent=[1])) == [KillWorker(1)]

    def test_a_lone_rank_that_pauses_and_is_stopped_ends_the_run(self) -> None:
        scene = stepping(3, nproc=1, standbys=0)
        scene.tell(DeadlinePaused(0, 1, paused=True))
        out = scene.wait((MAX_RETRIES_IN_ROW + 2) * STARTUP_S, silent=[0])
        assert ended(out).message.startswith("no worker gave a sign of life")

    def test_a_pause_ends_with_its_generation_and_has_the_time_of_a_start_to_come_back(self) -> None:
        scene = stepping(3)
        scene.tell(DeadlinePaused(0, 1, paused=True))
        scene.die(1)
        scene.offer(3, ranks=[1, 2])
        assert scene.wait(STARTUP_S - 1) == []
        assert only(KillWorker, scene.wait(1)) == [KillWorker(0)]

    def test_the_first_step_gets_the_startup_allowance(self) -> None:
        scene = stepping(0)
        scene.begin(1)
        assert scene.wait(STARTUP_S - 1, waiting=[0, 2]) == []
        assert only(KillWorker, scene.wait(2, waiting=[0, 2])) == [KillWorker(1)]

    def test_the_first_step_of_a_cold_replacement_gets_the_startup_allowance(self) -> None:
        scene = stepping(3, standbys=0)
        scene.die(1)
        scene.start(3)
        scene.recover(3)
        assert scene.wait(STARTUP_S - 1, waiting=[0, 2]) == []
        scene.run_step(4)
        assert only(KillWorker, scene.wait(FLOOR_S, waiting=[0, 2])) == [KillWorker(3)]

    def test_who_does_not_report_while_the_generation_forms_is_killed(self) -> None:
        scene = recovering(3)
        scene.offer(3, ranks=[0, 2])
        assert scene.wait(STARTUP_S - 1) == []
        assert only(KillWorker, scene.wait(1)) == [KillWorker(3)]

    def test_who_does_not_restore_while_its_peers_do_is_killed(self) -> None:
        scene = recovering(3)
        scene.offer(3)
        scene.restore(3, ranks=[0, 1])
        assert only(KillWorker, scene.wait(STARTUP_S)) == [KillWorker(2)]

    def test_a_rank_that_returned_while_its_peers_wait_for_it_ends_the_run(self) -> None:
        scene = stepping(3)
        scene.tell(TrainReturned(0), WorkerExited(0, 0, None, 0.0))
        end = ended(scene.wait(FLOOR_S, waiting=[1, 2]))
        assert end.outcome == "failed"
        assert end.message == "rank 0 returned from train() before the last step of the others"

    def test_ranks_with_fewer_steps_than_their_peers_end_the_run_and_are_not_killed(self) -> None:
        scene = stepping(3)
        scene.done(3, ranks=[0])
        end = ended(scene.wait(FLOOR_S, waiting=[1, 2]))
        assert (end.outcome, end.message) == ("failed", "rank 0 had no step left while the others still step")

    def test_a_rank_that_hangs_while_others_are_done_is_the_one_that_is_killed(self) -> None:
        scene = stepping(3)
        scene.done(3, ranks=[0, 2])
        assert only(KillWorker, scene.wait(FLOOR_S)) == [KillWorker(1)]

    def test_time_that_the_coordinator_did_not_see_counts_against_nobody(self) -> None:
        # A controller that was dead, or that a slow store held up: the life signs are still under way to it.
        scene = stepping(3)
        scene.wait(1, waiting=[0, 2])
        scene.now += 1000
        assert scene.tick() == []
        assert scene.wait(FLOOR_S - 0.5, waiting=[0, 2]) == []

    @pytest.mark.parametrize("back", [Scene.tick, Scene.rejoin], ids=["slow", "new"])
    def test_nor_does_it_count_against_who_holds_his_life_signs_up_on_purpose(
        self, back: Callable[[Scene], object]
    ) -> None:
        scene = stepping(3)
        scene.tell(DeadlinePaused(1, 1, paused=True))
        scene.now += STARTUP_S
        back(scene)
        assert scene.wait(FLOOR_S + 1, silent=[1]) == []

    def test_a_verdict_waits_for_deaths_that_the_coordinator_did_not_see(self) -> None:
        scene = stepping(3)
        scene.raises(0, 3, collective=True)
        scene.now += 1000
        assert scene.tick() == []
        assert told(GenerationBroken, scene.die(1))[0].cause == "rank 1 was killed by signal 9"

    def test_a_machine_that_booted_again_starts_its_clock_anew(self) -> None:
        scene = stepping(3)
        scene.now = 5.0
        assert scene.wait(FLOOR_S - 0.5, waiting=[0, 2]) == []
        assert only(KillWorker, scene.wait(1, waiting=[0, 2])) == [KillWorker(1)]


class TestUploads:
    def test_all_members_are_told_the_same_step(self) -> None:
        out = restoring().restore(0)
        assert only(StoreSnapshot, out) == [StoreSnapshot(worker, 1, 1) for worker in range(3)]

    def test_the_head_moves_when_every_rank_has_stored_the_step(self) -> None:
        scene = stepping(1)
        assert scene.stored(1, ranks=[0, 2, 2]) == []
        out = scene.stored(1, ranks=[1])
        assert out == [
            MoveHead(1, 1, ("key-0-1", "key-1-1", "key-2-1")),
            *(StoreSnapshot(worker, 1, 2) for worker in range(3)),
        ]

    def test_manifests_of_the_broken_generation_commit_nothing(self) -> None:
        scene = stepping(1, standbys=1)
        scene.stored(1, ranks=[0, 2])
        late = ManifestStored(2, 1, 2, 1, "old", 1, 0.1)
        scene.die(1)
        scene.recover(0)
        assert scene.tell(late) == []
        assert scene.stored(1, ranks=[0, 1]) == []
        assert only(MoveHead, scene.stored(1, ranks=[2])) == [
            MoveHead(2, 1, ("key-0-1", "key-1-1", "key-2-1"))
        ]

    def test_a_manifest_of_another_rank_or_step_is_not_taken(self) -> None:
        scene = stepping(1)
        scene.stored(1, ranks=[0, 1])
        assert scene.tell(ManifestStored(2, 1, 0, 1, "key", 1, 0.1)) == []
        assert scene.stored(2, ranks=[2]) == []
        assert scene.state.stored == {"0": "key-0-1", "1": "key-1-1"}

    def test_a_slow_store_makes_the_newest_begun_step_the_next_and_counts_what_it_passed_over(self) -> None:
        scene = stepping(4)
        scene.begin(5, ranks=[1])
        assert only(StoreSnapshot, scene.stored(1)) == [StoreSnapshot(worker, 1, 5) for worker in range(3)]
        assert scene.state.missed == 3

    def test_a_missed_upload_aims_again_once(self) -> None:
        scene = stepping(3)
        assert scene.missed(0, 1) == [StoreSnapshot(worker, 1, 3) for worker in range(3)]
        assert scene.missed(1, 1) == []
        assert scene.state.missed == 2

    def test_members_hear_of_the_head(self) -> None:
        scene = stepping(3)
        assert scene.tell(HeadMoved(1, 2)) == [NoteHead(worker, 2) for worker in range(3)]
        assert scene.tell(HeadMoved(1, 1)) == [NoteHead(worker, 2) for worker in range(3)]
        assert scene.state.head == 2

    def test_steps_older_than_the_head_that_are_run_again_do_not_take_it_back(self) -> None:
        scene = stepping(3)
        scene.tell(HeadMoved(1, 3))
        scene.die(1)
        scene.recover(1)
        scene.run_step(2)
        assert not only(MoveHead, scene.stored(2))
        scene.run_step(3)
        assert only(MoveHead, scene.stored(3))

    def test_after_the_last_step_the_last_step_is_what_is_left_to_store(self) -> None:
        scene = finishing(3)
        assert only(StoreSnapshot, scene.stored(1)) == [StoreSnapshot(worker, 1, 3) for worker in range(3)]
        assert only(MoveHead, scene.stored(3))
        assert scene.state.target == 3

    def test_a_closing_uploader_is_asked_for_nothing_more(self) -> None:
        scene = finishing(3)
        scene.missed(0, 1)
        assert scene.missed(0, 3) == []


class TestTheEnd:
    def test_when_all_are_done_they_are_told_and_the_standbys_go(self) -> None:
        scene = stepping(3)
        assert scene.done(3, ranks=[0, 0, 1]) == []
        assert scene.done(3, ranks=[2]) == [Finish(0, 1), Finish(1, 1), Finish(2, 1), Release(3)]

    def test_a_worker_that_starts_after_the_last_step_goes_again(self) -> None:
        scene = stepping(3)
        scene.die(3)
        scene.done(3)
        assert scene.start(4) == [Release(4)]

    def test_a_recovery_with_nothing_left_to_step_through_orders_no_new_standby(self) -> None:
        scene = recovering(3)
        scene.recover(3)
        out = scene.done(3)
        assert told(RecoveryFinished, out)
        assert not only(StartWorker, out)

    def test_the_run_is_finished_when_all_have_exited_with_0(self) -> None:
        scene = finishing(3)
        scene.die(3, code=0)
        assert scene.die(0, 1, code=0) == []
        assert (ended(scene.die(2, code=0)).outcome, scene.state.message) == (
            "finished",
            "finished at step 3",
        )

    @pytest.mark.parametrize(("code", "how"), [(1, "exited with status 1"), (None, "was killed by signal 9")])
    def test_a_rank_that_does_not_exit_with_0_after_its_last_step_fails_the_run(
        self, code: int | None, how: str
    ) -> None:
        end = ended(finishing(3).die(1, code=code))
        assert (end.outcome, end.message) == ("failed", f"rank 1 {how} after its last step")

    def test_done_ranks_step_again_when_a_peer_dies(self) -> None:
        scene = stepping(3)
        scene.done(3, ranks=[0, 2])
        scene.die(1)
        scene.recover(3)
        assert only(Finish, scene.done(3)) == [Finish(0, 2), Finish(2, 2), Finish(3, 2)]

    @pytest.mark.parametrize("scene", PHASES)
    def test_a_stop_ends_the_run_wherever_it_stands(self, scene: Callable[[], Scene]) -> None:
        run = scene()
        living = run.state.living()
        out = run.tell(StopRequested("enough"))
        assert only(Unwind, out) == [Unwind(worker.worker, "enough") for worker in living]
        assert ended(out) == EndRun("stopped", "enough", {}, 10.0)
        assert run.tell(StopRequested("again")) == []
        assert run.wait(2 * STARTUP_S) == []


class TestResume:
    def test_a_run_that_ended_goes_on_with_new_workers(self) -> None:
        scene = stepping(3)
        scene.tell(HeadMoved(1, 2), StopRequested("enough"))
        assert scene.tell(RunResumed()) == [StartWorker(4), StartWorker(5), StartWorker(6), StartWorker(7)]
        out = scene.start(4, 5, 6, 7)
        assert only(Join, out) == [
            Join(4, 2, 0, 3, restores=True),
            Join(5, 2, 1, 3, restores=True),
            Join(6, 2, 2, 3, restores=True),
        ]
        assert only(RestoreFrom, scene.offer(2))[0] == RestoreFrom(4, 2, 2, scratch=False)

    def test_failures_of_before_do_not_count_after(self) -> None:
        scene = stepping(3)
        scene.raises(1, 3)
        scene.tell(StopRequested("enough"), RunResumed())
        scene.start(4, 5, 6, 7)
        scene.recover(3)
        assert scene.wait(2 * VERDICT_S) == []
        scene.raises(1, 3)
        scene.wait(VERDICT_S)
        assert scene.state.phase == Phase.JOINING

    def test_a_run_whose_every_process_was_killed_goes_on_too(self) -> None:
        scene = stepping(3)
        scene.tell(HeadMoved(1, 2), RunResumed())
        scene.tell(AgentJoined(()))
        scene.start(4, 5, 6, 7)
        assert only(Go, scene.recover(2)) == [Go(worker, 2) for worker in (4, 5, 6)]

    def test_the_first_step_after_it_gets_the_startup_allowance(self) -> None:
        scene = stepping(3)
        scene.tell(RunResumed())
        scene.start(4, 5, 6, 7)
        scene.recover(3)
        assert scene.wait(STARTUP_S - 1, waiting=[4, 6]) == []


class TestTheControllerComesBack:
    def test_workers_that_were_ordered_are_ordered_again(self) -> None:
        scene = Scene()
        assert scene.rejoin() == [StartWorker(0), StartWorker(1), StartWorker(2), StartWorker(3)]

    def test_while_it_forms_members_are_told_again_to_leave(self) -> None:
        scene = stepping(3, standbys=0)
        scene.die(1)
        assert scene.rejoin() == [StartWorker(3), Leave(0, 1), Leave(2, 1)]

    def test_while_it_joins_members_are_told_again_to_join(self) -> None:
        assert recovering(3).rejoin() == [
            Join(0, 2, 0, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
            Join(3, 2, 1, 3, restores=True),
        ]

    def test_while_it_restores_the_step_is_told_again(self) -> None:
        out = restoring().rejoin()
        assert out == [
            *(Join(worker, 1, worker, 3, restores=False) for worker in range(3)),
            *(RestoreFrom(worker, 1, 0, scratch=True) for worker in range(3)),
        ]

    def test_while_it_steps_go_and_the_uploads_are_told_again(self) -> None:
        # Without Go a member that has not heard it would wait until it counts as stalled.
        scene = stepping(1)
        scene.stored(1, ranks=[1])
        out = scene.rejoin()
        assert only(Go, out) == [Go(worker, 1) for worker in range(3)]
        assert only(StoreSnapshot, out) == [StoreSnapshot(0, 1, 1), StoreSnapshot(2, 1, 1)]
        assert only(Join, out) == [Join(worker, 1, worker, 3, restores=False) for worker in range(3)]

    def test_after_the_last_step_finish_and_release_are_told_again(self) -> None:
        assert finishing().rejoin() == [Finish(0, 1), Finish(1, 1), Finish(2, 1), Release(3)]

    def test_a_standby_that_warms_up_is_told_so_again(self) -> None:
        scene = Scene()
        scene.start(0, 1, 2, 3)
        assert StandBy(3) in scene.rejoin()

    def test_a_kill_is_ordered_again(self) -> None:
        scene = stepping(3)
        scene.wait(FLOOR_S, silent=[1], waiting=[0, 2])
        assert KillWorker(1) in scene.rejoin()

    def test_workers_that_are_missing_are_dead(self) -> None:
        scene = stepping(3)
        out = scene.rejoin(1)
        assert told(RankLost, out) == [RankLost(1, 1, 1, "vanished")]
        assert only(Join, out) == [
            Join(0, 2, 0, 3, restores=True),
            Join(3, 2, 1, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
        ]

    def test_all_that_are_missing_are_one_fault_and_none_of_them_is_promoted(self) -> None:
        scene = stepping(3, standbys=2)
        out = scene.rejoin(1, 3)
        assert scene.generation == 2
        assert only(Join, out) == [
            Join(0, 2, 0, 3, restores=True),
            Join(4, 2, 1, 3, restores=True),
            Join(2, 2, 2, 3, restores=True),
        ]

    def test_when_the_whole_node_was_lost_the_run_starts_over_from_the_store(self) -> None:
        scene = stepping(3)
        out = scene.tell(AgentJoined(()))
        assert only(StartWorker, out) == [StartWorker(4), StartWorker(5), StartWorker(6)]
        scene.start(4, 5, 6)
        assert only(RestoreFrom, scene.offer(2))[0] == RestoreFrom(4, 2, 2, scratch=False)

    def test_when_nothing_can_replace_the_missing_the_run_ends_once(self) -> None:
        scene = stepping(3, standbys=0, max_restarts=0)
        out = scene.tell(AgentJoined(()))
        assert ended(out).message == "no standby is left for rank 0, 1, 2"
        assert scene.state.phase == Phase.ENDED

    def test_a_long_absence_of_the_agent_is_nobodys_silence(self) -> None:
        scene = stepping(3)
        scene.now += FLOOR_S
        scene.rejoin()
        assert scene.wait(FLOOR_S - 0.5) == []

    @pytest.mark.parametrize("scene", PHASES)
    def test_told_twice_it_orders_the_same(self, scene: Callable[[], Scene]) -> None:
        run = scene()
        assert run.rejoin() == run.rejoin()


class TestTheState:
    @pytest.mark.parametrize("scene", PHASES)
    def test_it_survives_json_in_every_phase(self, scene: Callable[[], Scene]) -> None:
        state = scene().state
        assert RunState.load(json.loads(json.dumps(state.record()))) == state

    def test_it_survives_json_with_a_verdict_to_come_and_after_the_end(self) -> None:
        scene = stepping(3)
        scene.raises(1, 3)
        assert twin(scene.state).state == scene.state
        scene.tell(StopRequested("enough"))
        assert twin(scene.state).state == scene.state

    def test_a_coordinator_loaded_from_it_shares_nothing_with_it(self) -> None:
        scene = stepping(3)
        other = twin(scene.state)
        other.handle(WorkerExited(1, None, 9, 0.0), scene.now)
        assert scene.state.owners == [0, 1, 2]

    def test_states_of_an_earlier_version_are_read(self) -> None:
        record = stepping(3).state.record()
        del record["awake_at"], record["recovery_lost"]
        assert RunState.load(record).phase == Phase.STEPPING

    def test_a_broken_state_is_found_with_its_evidence(self) -> None:
        scene = stepping(3)
        scene.state.owners[1] = 0
        with pytest.raises(InvalidTransition, match="owns two ranks") as caught:
            validate(scene.state)
        assert caught.value.evidence["state"] == scene.state.record()

    def test_a_run_that_has_not_started_is_sound(self) -> None:
        validate(Coordinator().state)

    def test_a_standbys_readiness_is_kept(self) -> None:
        scene = Scene()
        scene.start(0, 1, 2, 3)
        scene.tell(StandbyReady(3, warm=False, note="its data is an iterator"))
        assert (scene.state.workers[3].role, scene.state.workers[3].note) == (
            Role.READY,
            "its data is an iterator",
        )
