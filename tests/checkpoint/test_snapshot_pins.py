"""Pins: what an upload holds no capture touches, and no capture waits."""

from typing import Any

import numpy as np
import pytest

from resilient_sdk.checkpoint.slot import Slot
from resilient_sdk.errors import InvalidTransition, NothingToRestore


def test_the_pinned_slot_survives_ten_captures(run: Any) -> None:
    file = run.snapshots(0)
    run.capture(file, 0, 1)
    pinned = file.pin(1)
    before = pinned.stream.tobytes()
    for step in range(2, 12):
        run.capture(file, 0, step)
        assert file.steps() == tuple(dict.fromkeys((*range(step, max(step - 2, 1), -1), 1)))
        assert pinned.stream.tobytes() == before
        assert file.holds(pinned)
    assert run.is_it(file.read(1), 0, 1)
    file.release(pinned)
    run.capture(file, 0, 12)
    assert file.steps() == (12, 11, 10)


def test_pins_count_and_only_one_slot_is_pinned(run: Any) -> None:
    file = run.snapshots(0)
    with pytest.raises(NothingToRestore):
        file.pin(1)
    run.capture(file, 0, 1)
    run.capture(file, 0, 2)
    pinned = file.pin(1)
    assert file.pin(1).slot == pinned.slot
    with pytest.raises(InvalidTransition):
        file.pin(2)
    file.release(pinned)
    with pytest.raises(InvalidTransition):
        file.pin(2)
    file.release(pinned)
    with pytest.raises(InvalidTransition):
        file.release(pinned)
    file.release(file.pin(2))


def test_the_slot_that_is_about_to_be_overwritten_cannot_be_pinned(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run.snapshots(0)
    run.capture(file, 0, 1)
    run.capture(file, 0, 2)
    begin = Slot.begin

    def pin_first(
        slot: Slot, nbytes: int, table_nbytes: int
    ) -> np.ndarray:  # what an uploader may do just then
        with pytest.raises(NothingToRestore):
            file.pin(1)
        return begin(slot, nbytes, table_nbytes)

    monkeypatch.setattr(Slot, "begin", pin_first)
    run.capture(file, 0, 3)
    assert file.steps() == (3, 2)


def test_a_pinned_step_that_is_rolled_back_is_said_so_but_not_torn(run: Any) -> None:
    file = run.snapshots(0)
    run.capture(file, 0, 1)
    run.capture(file, 0, 2)
    pinned = file.pin(2)
    before = pinned.stream.tobytes()
    file.forget_after(1)
    assert not file.holds(pinned)
    for step in (2, 3, 4):
        run.capture(file, 0, step, generation=2)
        assert pinned.stream.tobytes() == before
    assert not file.holds(pinned)
    assert file.steps() == (4, 3)
    file.release(pinned)
