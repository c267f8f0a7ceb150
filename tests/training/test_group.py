"""Process groups of real ranks: formed, broken out of, and left."""

import pytest


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_lost_rank_is_replaced_and_the_step_runs_again_bit_for_bit(zygote, stage, action):
    # A killed rank's connections close; a stopped one's do not, and only the abort 0.3 s later can help.
    answers = zygote.run("fault", processes=4, stage=stage, action=action)
    assert answers[1] == {"ok": False, "died": -9}
    for survivor in (answers[0], answers[2]):
        assert survivor["raised"] < (0.5 if action == "kill" else 0.3 + 0.5)
        if action == "stop":
            assert survivor["raised"] >= 0.3, "the collective failed before anybody aborted it"
        assert survivor["left"] < 1.0


@pytest.mark.parametrize("stage", [1, 3])
def test_every_group_gets_the_timeout_and_an_abort_breaks_only_them(zygote, stage):
    for answer in zygote.run("timeouts", stage=stage):
        assert set(answer["timeouts"]) == {20.0}
        assert len(answer["timeouts"]) >= 2
        assert answer["store"]
        assert answer["heard"] == len(b"alive")
        assert answer["watched"] == 2 * len(
            answer["timeouts"]
        )  # two peers in each group; no listener, no store


def test_waiting_for_a_rank_that_never_comes_can_be_ended(zygote):
    first, second = zygote.run("cancelled", processes=2, stage=1)
    assert (first["error_kind"], second["error_kind"]) == ("StaleGeneration", "CoordinationError")
    assert max(first["after"], second["after"]) < 5


@pytest.mark.parametrize("when", ["world", "engine", "engine, stopped"])
def test_a_rank_that_is_gone_while_groups_are_made_holds_nobody(zygote, when):
    # gloo waits in the store for an address that never comes, there is no connection to shut down.
    answers = zygote.run("dies_while_forming", stage=2, when=when)
    for survivor in (answers[0], answers[2]):
        assert survivor["after"] < 0.3 + 0.7
        assert survivor["error_kind"] == ("StaleGeneration" if when == "world" else "RuntimeError"), survivor
        assert "Not implemented" not in survivor["text"]
