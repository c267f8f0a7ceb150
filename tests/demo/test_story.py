"""The demo tells the truth: what it reports is what two real runs wrote down."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resilient_sdk.cli import app
from resilient_sdk.demo.measure import read_losses, recovery
from resilient_sdk.runtime.run import runs


@pytest.mark.usefixtures("home")
def test_the_demo_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["demo", "--steps", "12", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["identical_losses"] is True
    assert report["identical_weights"] is True
    assert report["steps_lost"] == 0
    assert report["recovery_s"] == pytest.approx(sum(report["phases_s"].values()))
    assert list(report["phases_s"]) == ["detect", "promote", "reform", "restore", "step", "commit"]
    assert min(report["phases_s"].values()) >= 0
    assert report["step_s"] > 0
    assert report["baseline"]["weights_sha256"] == report["weights_sha256"]
    assert [len(report["losses"][rank]) for rank in ("0", "1", "2")] == [12, 12, 12]
    for phase in (
        "SIGKILL to rank 1",
        "detected",
        "promoted",
        "re-formed",
        "restored",
        "stepping",
        "committed",
    ):
        assert phase in result.output
    assert list(runs()) == []


def journal(*facts: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"time": time, "fact": fact, **more} for time, fact, more in facts]


FORMED = {"step": 7, "lost": 0, "workers": [0, 3, 2], "phases": {"form": 0.1, "read": 0.01, "restore": 0.04}}


def test_a_recovery_ends_when_the_next_step_is_committed() -> None:
    facts = journal(
        (1.0, "GenerationFormed", {"step": 0, "lost": 0, "workers": [0, 1, 2], "phases": {}}),
        (9.9, "HeadMoved", {"step": 7}),
        (10.1, "RankLost", {"rank": 1}),
        (10.1, "StandbyPromoted", {"rank": 1}),
        (10.4, "GenerationFormed", FORMED),
        (10.45, "HeadMoved", {"step": 7}),
        (10.6, "RecoveryFinished", {"step": 8}),
        (10.7, "HeadMoved", {"step": 8}),
    )
    assert recovery(facts[:-1], killed_at=10.0) is None
    found = recovery(facts, killed_at=10.0)
    assert found is not None
    assert found.seconds == pytest.approx(0.7)
    assert found.step == 8
    assert found.phases == pytest.approx(
        {"detect": 0.1, "promote": 0.0, "reform": 0.25, "restore": 0.05, "step": 0.2, "commit": 0.1}
    )


def test_a_step_that_ran_twice_must_have_had_one_loss() -> None:
    lines = ['{"step": 1, "loss": 0.5}', '{"step": 2, "loss": 0.25}', '{"step": 2, "loss": 0.25}']
    assert read_losses("\n".join(lines)) == [0.5, 0.25]
    assert read_losses("\n".join([*lines, '{"step": 2, "loss": 0.26}'])) is None
    assert read_losses("\n".join([*lines, '{"step": 4, "loss": 0.1}'])) is None
