"""Values and sentences, without a run."""

import pytest

from resilient_sdk.cli.options import processes, size
from resilient_sdk.cli.words import Narrator, duration, progress
from resilient_sdk.errors import ConfigError
from resilient_sdk.events import _KINDS as KINDS
from resilient_sdk.ids import RunId
from resilient_sdk.runtime.run import Status


@pytest.mark.parametrize(
    ("text", "value"),
    [("8G", 8 << 30), ("512MiB", 512 << 20), ("1.5k", 1536), ("100", 100), ("2 TB", 2 << 40)],
)
def test_a_size_is_written_as_people_do(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "G", "-1G", "1.2.3", "8X"])
def test_anything_else_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError):
        size(text)


def test_the_number_of_ranks_as_torchrun_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_sdk.cli.options.gpu_count", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert [processes(text) for text in ("3", "gpu", "auto", "cpu")] == [3, 2, 2, 6]
    monkeypatch.setattr("resilient_sdk.cli.options.gpu_count", lambda: 0)
    assert processes("auto") == 6
    with pytest.raises(ConfigError, match="no GPU here"):
        processes("gpu")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0853, "85 ms"), (1.654, "1.65 s"), (75, "75 s"), (200, "3 min"), (9000, "2 h"), (5e5, "6 days")],
)  # fmt: skip
def test_a_duration_reads_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


FACTS = (
    {"fact": "RankLost", "generation": 1, "rank": 1, "worker": 4, "cause": "was killed by signal 9"},
    {"fact": "GenerationBroken", "generation": 1, "cause": "rank 1 was killed by signal 9"},
    {"fact": "GenerationBroken", "generation": 2, "cause": "rank 0 raised ValueError at step 3"},
    {
        "fact": "GenerationFormed", "generation": 3, "workers": [0, 5], "step": 7, "lost": 1,
        "phases": {"form": 0.02},
    },
    {"fact": "HeadMoved", "generation": 3, "step": 8},
)  # fmt: skip


def test_a_lost_rank_is_told_once_and_commits_are_not_told() -> None:
    narrator = Narrator()
    told = [line[0][10:] for fact in FACTS if (line := narrator.line({"time": 0.0, **fact})) is not None]
    assert told == [
        "rank 1 is lost: it was killed by signal 9",
        "generation 2 broke: rank 0 raised ValueError at step 3",
        "generation 3: 2 ranks at step 7, 1 step to run again (form 20 ms)",
    ]


def test_every_fact_of_the_journal_can_be_told() -> None:
    values = {"int": 1, "str": "x", "bool": True, "float": 0.5}
    for name, kind in KINDS.items():
        if kind.durable:
            fields = {n: values.get(getattr(a, "__name__", ""), {}) for n, a in kind.__annotations__.items()}
            line = Narrator().line({"time": 0.0, **fields, "fact": name})
            assert line is None or "\n" not in line[0]


def test_progress_names_only_what_is_known() -> None:
    status = Status(RunId("run-1"), "running", 1, 3, None, 0.0, (1, 2), 1, (), 0, 0, 0, {"loss": 0.1251})
    assert progress(status) == "step 3, 1 standby ready, loss 0.1251"
