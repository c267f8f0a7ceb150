"""The benchmarks' arithmetic on made-up numbers; the benchmarks themselves are run by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import gather, leak, recovery
from tests.benchmarks.report import Bar, Report, Spread, text
from tests.benchmarks.work import Mark, Marks, marks


def made_up(path: Path | None = None) -> dict[str, Any]:
    report = Report("made-up", 5)
    report.figure("a thing", [3.0, 1.0, 2.0])
    report.bar("fast enough", 1.5, "s", 2.0, "lower")
    report.bar("times faster", 19.9, "x", 20.0, "higher")
    report.note("invented")
    report.finish(path)
    return report.record()


def test_a_spread_is_median_and_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


@pytest.mark.parametrize(
    ("value", "better", "holds"),
    [(1.9, "lower", True), (2.0, "lower", True), (2.1, "lower", False),
     (2.1, "higher", True), (2.0, "higher", True), (1.9, "higher", False)],
)  # fmt: skip
def test_a_bar_holds_up_to_its_limit(value: float, better: Any, holds: bool) -> None:
    assert Bar("it", value, "s", 2.0, better).holds is holds


def test_the_json_has_what_the_page_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(tmp_path / "new" / "made-up.json")
    record = json.loads((tmp_path / "new" / "made-up.json").read_text())
    assert {"benchmark", "machine", "versions", "repetitions", "results", "bars"} <= set(record)
    assert record["results"]["a thing"] == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3, "unit": "s"}
    assert [bar["holds"] for bar in record["bars"]] == [True, False]
    assert text(record) in capsys.readouterr().out


def test_a_bar_that_does_not_hold_is_shown() -> None:
    record = made_up()
    assert "DOES NOT HOLD  times faster: 19.9 x, wanted >= 20" in text(record)
    page = gather.page([record])
    assert "| made-up: fast enough: 1.5 s, wanted <= 2 | yes |" in page
    assert "| made-up: times faster: 19.9 x, wanted >= 20 | **no** |" in page


def test_marks_are_read_as_they_were_written(tmp_path: Path) -> None:
    log = Marks(str(tmp_path))
    log.note("start", 2, 0)
    log.note("step", 2, 1)
    with (tmp_path / "marks-2").open("a") as file:
        file.write("step 2 17.")  # still being written
    found = marks(tmp_path, 2)
    assert [(mark.what, mark.step) for mark in found] == [("start", 0), ("step", 1)]
    assert found[0].at <= found[1].at
    assert marks(tmp_path, 0) == []


def test_a_step_is_timed_only_where_nothing_came_between() -> None:
    told = [("step", 1, 1.0), ("step", 2, 1.5), ("start", 0, 9.0), ("loaded", 2, 9.1), ("step", 3, 9.4),
            ("step", 4, 9.9), ("step", 4, 12.0), ("step", 5, 12.6), ("step", 6, 99.0)]  # fmt: skip
    steps = recovery._periods([Mark(what, step, at, 0.0) for what, step, at in told], until=50.0)
    assert steps == pytest.approx([0.5, 0.5, 0.6])


def test_phases_follow_each_other_from_the_kill() -> None:
    killed, ahead = 100.0, 1_000_000.0
    events: dict[str, dict[str, Any]] = {
        "WorkerExited": {"time": 1_000_100.11, "at": 100.1},
        "GenerationBroken": {"time": 1_000_100.2},
        "GenerationFormed": {"time": 1_000_100.5, "phases": {"rebuild": 0.2}},
        "RecoveryFinished": {"time": 1_000_100.9},
        "HeadMoved": {"time": 1_000_101.0},
    }
    phases = recovery._phases(events, killed, ahead)
    assert phases == pytest.approx(
        {"detect": 0.1, "decide": 0.1, "re-form: rebuild": 0.2, "re-form": 0.3, "replay": 0.4, "commit": 0.1,
         "step in memory": 0.9, "total": 1.0}
    )  # fmt: skip


def test_growth_is_from_the_fifth_recovery_to_the_last() -> None:
    report = Report("leak", 10)
    leak.tell(report, 2, [leak.Size(100.0 + n, 20, 9) for n in range(10)])
    growth = {bar.name: bar for bar in report.bars}
    assert growth["ZeRO-2: growth of rss_mib"].value == pytest.approx((109 / 104 - 1) * 100)
    assert not growth["ZeRO-2: growth of rss_mib"].holds
    assert growth["ZeRO-2: growth of fds"].value == 0.0
    assert growth["ZeRO-2: growth of fds"].holds
