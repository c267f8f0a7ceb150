"""What cannot work is said in one line, with the fix, and leaves nothing running (the fixture `home` looks)."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import resilient_sdk as rs
from resilient_sdk.checkpoint.head import decode_head, encode_head
from resilient_sdk.checkpoint.manifest import decode, encode, ref_of
from resilient_sdk.errors import (
    CannotPickle,
    ConfigError,
    Corrupt,
    NewerFormat,
    RunFailed,
    RunNotFound,
    StoreError,
)
from resilient_sdk.faults import Fault
from resilient_sdk.runtime.run import Run, Status
from tests.process.kit import LIMIT_S, NPROC, at_gate, finish, kill, launch, open_gates, undisturbed, until
from tests.process.workload import Workload, read_result, train

pytestmark = pytest.mark.usefixtures("home")


def said(problem: pytest.ExceptionInfo[Any]) -> str:
    """The message, which is one line."""
    text = str(problem.value)
    assert "\n" not in text
    return text


# ---- before anything is started ----


def a_function(job: Any) -> None:
    raise AssertionError(f"never started: {job}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nproc": 0}, "nproc = 0: input should be greater than or equal to 1. See"),
        ({"nproc": "two"}, "nproc = 'two'"),
        ({"standbys": -1}, "standbys = -1"),
        ({"stall_floor_s": 0}, "stall_floor_s = 0"),
        ({"run_id": "../x"}, "run id = '../x'. Use up to 64 of"),
        ({"run_id": ""}, "run id = ''"),
        ({"store": "redis://here"}, "no store for 'redis://here'. give a directory"),
        ({"store": ""}, "the store's address is empty"),
        ({"faults": [{"point": "begin", "whom": 1}]}, "whom"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as problem:
        rs.launch(a_function, **options)
    assert says in said(problem)
    assert list(rs.runs()) == []


def test_a_run_is_a_function_or_a_script() -> None:
    for arguments in ({}, {"train": a_function, "script": __file__}, {"train": 3}, {"script": "missing.py"}):
        with pytest.raises(ConfigError) as problem:
            rs.launch(**arguments)
        said(problem)
    assert list(rs.runs()) == []


def test_a_function_that_cannot_travel(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        held = {"a lock": threading.Lock(), "a file": file, "a generator": (n for n in range(3))}
        for name, thing in held.items():

            def unpicklable(job: Any, thing: Any = thing) -> None:
                raise AssertionError(job, thing)

            with pytest.raises(CannotPickle) as problem:
                rs.launch(unpicklable)
            assert "unpicklable cannot travel" in said(problem), name
            assert "inside the function" in said(problem)
    assert list(rs.runs()) == []


@pytest.mark.parametrize(
    "run", ["run-00000000", "../x", "..", "", "/etc", "a" * 65, "run\n", "run\0", "Run-1"]
)
def test_a_run_that_does_not_exist(run: str, home: Path) -> None:
    (home / "x").mkdir(parents=True)
    (home / "x" / "run.json").write_text("{}")
    for ask in (rs.attach, rs.resume):
        with pytest.raises(RunNotFound, match="there is no run") as problem:
            ask(run)
        said(problem)


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in (str(tmp_path / "file"), str(tmp_path / "file" / "store"), "/proc/store"):
        with pytest.raises(StoreError) as problem:
            rs.launch(a_function, store=store)
        assert store in said(problem)
    assert list(rs.runs()) == []


def test_memory_that_cannot_be_made_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RESILIENT_MEMORY", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="Set RESILIENT_MEMORY") as problem:
        rs.launch(a_function)
    said(problem)
    assert list(rs.runs()) == []


def test_shared_memory_that_a_stranger_has_made_is_refused(tmp_path: Path) -> None:
    """Anybody can make a directory in /dev/shm, and a link to one."""
    memory = Path(os.environ["RESILIENT_MEMORY"]) / f"resilient-{os.getuid()}-mine"
    memory.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory of yours"):
        rs.launch(a_function, run_id="mine")
    memory.unlink()
    if os.getuid() == 0:
        memory.mkdir()
        os.chown(memory, 65534, 65534)
        with pytest.raises(ConfigError, match="is not a directory of yours"):
            rs.launch(a_function, run_id="mine")
        memory.rmdir()
    assert list(rs.runs()) == []


# ---- the user's code: seen by run.wait() ----


def _config(**more: Any) -> dict[str, Any]:
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, **more}


def _build() -> Any:
    import torch

    return torch.nn.Linear(4, 4)


def _data() -> Any:
    import torch

    return torch.arange(64.0).reshape(16, 4)


def _step(engine: Any, batch: Any) -> None:
    loss = engine(batch).pow(2).mean()
    engine.backward(loss)
    engine.step()


def unknown_key(job: Any) -> None:
    job.initialize(model=_build, config=_config(gradient_cliping=1.0))


def model_instance(job: Any) -> None:
    job.initialize(model=_build(), config=_config(zero_optimization={"stage": 3}))


def until_zero(job: Any) -> None:
    job.initialize(model=_build, config=_config())
    for _ in job.steps(_data(), until=0):
        raise AssertionError


def steps_first(job: Any) -> None:
    for _ in job.steps(_data(), until=3):
        raise AssertionError


def steps_twice(job: Any) -> None:
    engine = job.initialize(model=_build, config=_config())
    for _ in range(2):
        for step in job.steps(_data(), until=3):
            with step as batch:
                _step(engine, batch)


def initialize_twice(job: Any) -> None:
    for _ in range(2):
        job.initialize(model=_build, config=_config())


def no_engine_step(job: Any) -> None:
    engine = job.initialize(model=_build, config=_config())
    for step in job.steps(_data(), until=3):
        with step as batch:
            engine.backward(engine(batch).sum())


def not_entered(job: Any) -> None:
    engine = job.initialize(model=_build, config=_config())
    for step in job.steps(_data(), until=3):
        _step(engine, step._batch)


def swallowed(job: Any) -> None:
    engine = job.initialize(model=_build, config=_config())
    for step in job.steps(_data(), until=3):
        with step as batch, suppress(Exception):
            engine(batch["no such key"])


def loader_raises(job: Any) -> None:
    def batches() -> Iterator[Any]:
        yield from _data()[:4].unsqueeze(1)
        raise ValueError("record 4 is\nbroken")

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            return batches()

    engine = job.initialize(model=_build, config=_config())
    for step in job.steps(Broken(), until=9):
        with step as batch:
            _step(engine, batch)


def odd_loader(job: Any) -> None:
    job.initialize(model=_build, config=_config())
    for _ in job.steps(3, until=3):
        raise AssertionError


def exits(job: Any) -> None:
    engine = job.initialize(model=_build, config=_config())
    for step in job.steps(_data(), until=5):
        with step as batch:
            if step.index == 2 and not job.is_standby:
                sys.exit(3)
            _step(engine, batch)


def factory_fails(job: Any) -> None:
    job.initialize(model=lambda: [][1], config=_config())


def no_steps(job: Any) -> None:
    job.initialize(model=_build, config=_config())


def no_model(job: Any) -> None:
    job.initialize(model=lambda: "a model", config=_config())


Mistake = Callable[[Any], None]
NO_STEP = r"the step's body did not call engine\.step\(\)\. Call engine\.backward"
MISTAKES: dict[Mistake, str] = {
    until_zero: r"until = 0\. Give the number of optimizer steps, 1 or more\.",
    steps_first: r"job\.steps was called before job\.initialize\. Initialize first\.",
    steps_twice: r"job\.steps was called twice\. One loop a job",
    initialize_twice: r"job\.initialize was called twice\. One engine a job\.",
    no_engine_step: NO_STEP,
    not_entered: r"a step was not entered\. Write `with step as batch:`",
    swallowed: NO_STEP,
    odd_loader: r"int",
    no_model: r"model\(\) returned str\. Return a torch\.nn\.Module",
}


def make_each_alone() -> None:
    """In a process of its own: each mistake with plain `python`, as one line of JSON."""
    from resilient_sdk.training.job import Job

    for mistake in MISTAKES:
        job = Job(None, None)
        try:
            mistake(job)
        except ConfigError as problem:
            print(json.dumps({mistake.__name__: str(problem)}))
        job.close()


def test_mistakes_in_a_script_without_a_run() -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import make_each_alone; make_each_alone()"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, str] = {}
    for line in told.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert list(found) == [mistake.__name__ for mistake in MISTAKES]
    for mistake, pattern in MISTAKES.items():
        assert re.search(pattern, found[mistake.__name__]), found
        assert "\n" not in found[mistake.__name__]


IN_A_RUN: dict[Mistake, str] = {
    model_instance: r": ZeRO-3 partitions a model for good.*\. Pass model=build_model",
    no_engine_step: NO_STEP,
    no_model: r": model\(\) returned str\. Return a torch\.nn\.Module",
    no_steps: r": the code came to its end without job\.steps\(\)\. Loop over",
    loader_raises: r"ValueError on rank 0 at step 4: record 4 is broken\. `resilient logs",
    factory_fails: r"IndexError on rank 0 at step 0: list index out of range",
    exits: r"rank 0 exited with status 3 at step 3, twice",
}


def test_mistakes_in_a_run_are_named_in_one_line() -> None:
    """Every mistake in a run of its own, all at once. A ConfigError is its own message and is not tried again."""
    runs = {mistake: rs.launch(mistake, nproc=1, standbys=int(mistake is exits)) for mistake in IN_A_RUN}
    try:
        for mistake, run in runs.items():
            with pytest.raises(RunFailed) as problem:
                run.wait(timeout_s=LIMIT_S)
            text = said(problem)
            assert re.search(IN_A_RUN[mistake], text), text
            assert text.startswith(f"run {run.id}: ")
            assert problem.value.evidence["rank"] == 0
            assert run.status().generation == (2 if " on rank " in text or mistake is exits else 1)
    finally:
        for run in runs.values():
            run.stop()


def test_a_mistake_on_all_ranks_is_one_line_too() -> None:
    """Three ranks and a standby fail alike at the same moment."""
    run = rs.launch(unknown_key, nproc=3, standbys=1)
    with pytest.raises(RunFailed, match="Did you mean 'gradient_clipping'") as problem:
        run.wait(timeout_s=LIMIT_S)
    said(problem)
    assert "GenerationBroken" not in [event["fact"] for event in run.events()]


# ---- the user's data ----


@dataclass(frozen=True)
class OneShot(Workload):
    """Its data is a generator: used up once, and ending before the loop's `until`."""

    def __call__(self, job: Any) -> None:
        train(_OneShotJob(job), self)


class _OneShotJob:
    def __init__(self, job: Any) -> None:
        self._job = job

    def steps(self, _loader: Any, until: int) -> Any:
        import torch

        made = torch.Generator().manual_seed(3)
        batches = (torch.randn(4, 32, generator=made) for _ in range(4 * (until - 4) + 3))
        return self._job.steps(batches, until=until)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


def test_a_generator_works_and_ends_early_and_its_standby_says_cold(tmp_path: Path) -> None:
    def during(run: Run) -> None:
        status = until(run, lambda s: s.step == 5 and "cold" in "".join(s.standbys))
        assert (
            "its data is an iterator, which a rehearsal would use up; pass a function" in status.standbys[0]
        )
        kill(status.ranks[1])

    results = []
    for name, disturb in (("killed", during), ("clean", None)):
        run = launch(
            OneShot(out=tmp_path / name, gates=(5,) if disturb else ()), standbys=1 if disturb else 0
        )
        status = finish(run, disturb)
        assert (status.state, status.step) == ("finished", 8)
        assert "8" in status.message
        results.append(read_result(tmp_path / name, NPROC))
    assert results[0] == results[1]


@dataclass(frozen=True)
class CatchingAll(Workload):
    """Catches every Exception around what it does with its engine, and goes on as if nothing had been."""

    def __call__(self, job: Any) -> None:
        train(_CatchingJob(job), self)


class _CatchingJob:
    def __init__(self, job: Any) -> None:
        self._job = job

    def initialize(self, **arguments: Any) -> Any:
        return _CatchingEngine(self._job.initialize(**arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


class _CatchingEngine:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, batch: Any) -> Any:
        return self._engine(batch)

    def _catch(self, act: Callable[..., Any], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as problem:
            print("caught", type(problem).__name__, flush=True)

    def backward(self, loss: Any) -> None:
        self._catch(self._engine.backward, loss)

    def step(self) -> None:
        self._catch(self._engine.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("stage", [0, 2])
def test_who_catches_everything_survives_a_peers_death_all_the_same(stage: int, tmp_path: Path) -> None:
    work = Workload(out=tmp_path / "out", stage=stage)
    run = launch(CatchingAll(out=work.out, stage=stage, faults=(Fault("backward", 1, 5),)))
    status = finish(run)
    assert (status.state, status.recoveries) == ("finished", 1)
    assert "caught" in run.logs(0)
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")


# ---- no room ----


@contextmanager
def tiny(path: Path, nbytes: int) -> Iterator[bool]:
    """A file system of so many bytes at `path`. Where none can be mounted: False."""
    path.mkdir()
    options = f"size={nbytes},mode=0700"
    mounted = os.getuid() == 0 and (
        subprocess.run(
            ["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=False
        ).returncode
        == 0
    )
    if not mounted and os.environ.get("CI") != "true":
        pytest.skip("only root can mount a file system of its own")
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["/bin/umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """To the last byte of its file system."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(512)):
            continue


def test_a_store_that_is_full_at_the_start(tmp_path: Path) -> None:
    with tiny(tmp_path / "store", 65536) as mounted:
        if not mounted:
            pytest.skip("a full file system needs a mount; the next test takes the run's own budget instead")
        fill(tmp_path / "store" / "filler")
        with pytest.raises(StoreError, match="No space left") as problem:
            rs.launch(a_function, store=str(tmp_path / "store"))
        said(problem)
        assert list(rs.runs()) == []


def test_a_store_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    """Training goes on, the status says so, and what could not be committed stays in memory for a resume.

    Where nothing can be mounted the run's own budget is the boundary: its uploads are skipped in the same way.
    """
    work = Workload(out=tmp_path / "out", gates=(5,))
    with tiny(tmp_path / "store", 65536) as mounted:
        budget = {} if mounted else {"store_budget_bytes": 4096}
        run = launch(work, store=str(tmp_path / "store"), standbys=0, **budget)
        status = at_gate(run, 5)
        assert status.committed is None
        status = until(
            run, lambda s: s.skipped_uploads > 0 and ("was not stored" in s.message or not mounted)
        )
        if mounted:
            assert "No space left" in status.message
            assert [e["failed"] for e in run.events() if e["fact"] == "UploadMissed"] == [True]
        run.stop()
        stopped = run.status()
        assert (stopped.state, stopped.step) == ("stopped", 5)
        if mounted:
            assert stopped.committed is None
            assert "its newest state was not committed: " in stopped.message
            assert "No space left" in stopped.message
            assert "\n" not in stopped.message
            subprocess.run(["/bin/mount", "-o", "remount,size=64M", str(tmp_path / "store")], check=True)
        status = finish(rs.resume(run.id))
        assert (status.state, status.lost_steps) == ("finished", 0)
        assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")


def test_a_full_disk_under_the_run_itself_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, journal, logs and the store in one place, and no room there."""
    work = Workload(out=tmp_path / "out", gates=(5,))
    with tiny(tmp_path / "full", 256 << 10) as mounted:
        if not mounted:
            pytest.skip("a full file system needs a mount")
        monkeypatch.setenv("RESILIENT_HOME", str(tmp_path / "full"))
        run = launch(work, standbys=1)
        at_gate(run, 5)
        fill(tmp_path / "full" / "filler")
        kill(run.status().ranks[1])
        status = until(run, lambda s: s.generation == 2)
        status = until(run, lambda s: "No space left" in s.message)
        (tmp_path / "full" / "filler").unlink()
        status = finish(run)
        assert (status.state, status.recoveries) == ("finished", 1)
        assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")


def test_memory_that_is_too_small_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny(tmp_path / "memory", 300 << 10) as mounted:
        if not mounted:
            pytest.skip("a small memory needs a mount")
        monkeypatch.setenv("RESILIENT_MEMORY", str(tmp_path / "memory"))
        run = launch(Workload(out=tmp_path / "out"), standbys=0)
        with pytest.raises(RunFailed, match=r"no room for a snapshot of .* enlarge /dev/shm") as problem:
            run.wait(timeout_s=LIMIT_S)
        said(problem)
        assert not any(event.get("signal") for event in run.events() if event["fact"] == "WorkerExited")


# ---- a store that is damaged when a run is resumed ----


def manifests(run: Run, rank: int) -> list[Path]:
    """Of one rank, newest step first."""
    return sorted((_store(run) / f"rank-{rank:05d}+" / "manifests+").iterdir(), reverse=True)


def chunks(run: Run, rank: int) -> list[Path]:
    return list((_store(run) / f"rank-{rank:05d}+" / "chunks+").iterdir())


def _store(run: Run) -> Path:
    return run.directory.path / "store"


def stop_at(run: Run, gate: int) -> Status:
    """Stops a run at a gate, committed; returns its last status before."""
    try:
        status = at_gate(run, gate)
    finally:
        run.stop()
    stopped = run.status()
    assert (stopped.state, stopped.committed) == ("stopped", gate)
    return status


def fallback(run: Run, opened: int, gate: int) -> list[str]:
    """Resumes up to the next gate; checks that it is said that an older step was taken, and returns why."""
    before = sum(event["fact"] == "RestoreFailed" for event in run.events())
    resumed = rs.resume(run.id)
    open_gates(run, opened)
    status = stop_at(resumed, gate)
    refused = [event for event in run.events() if event["fact"] == "RestoreFailed"][before:]
    assert {event["step"] for event in refused} == {opened}
    formed = [event for event in run.events() if event["fact"] == "GenerationFormed"][-1]
    assert formed["lost"] == opened - formed["step"] >= 1
    assert status.message == f"step {opened} could not be restored: {refused[-1]['reason']}"
    return sorted(str(event["reason"]) for event in refused)


def test_what_is_damaged_is_not_restored_an_older_step_is_and_it_is_said(tmp_path: Path, home: Path) -> None:
    work = Workload(out=tmp_path / "out", gates=(5, 7))
    assert home.parent == tmp_path
    run = launch(work, standbys=0)
    stop_at(run, 5)

    with pytest.raises(ConfigError, match=r"has 2 ranks, and to go on with 3 is not possible yet.*nproc = 2"):
        rs.resume(run.id, nproc=3)
    head = _store(run) / "head"
    whole = head.read_bytes()
    head.write_bytes(whole.replace(b"resilient-head 1\n", b"resilient-head 2\n"))
    with pytest.raises(NewerFormat, match=r"the head has format 2, .*install the version that wrote it"):
        rs.resume(run.id)
    head.write_bytes(whole[:-9])
    with pytest.raises(Corrupt, match=r"the head does not match its hash.*from a copy"):
        rs.resume(run.id, nproc=2)
    head.write_bytes(whole)
    assert run.status().state == "stopped"

    newest = newest_chunk(run, 1)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    cut = manifests(run, 0)[0]
    cut.write_bytes(cut.read_bytes()[:-20])
    signature, chunk = fallback(run, 5, 7)
    assert signature.startswith("a manifest's signature does not match")
    assert chunk.startswith("chunk 0 of rank 1, step 5 does not match its hash")

    forge(run, 1)
    status = finish(rs.resume(run.id))
    refused = [event["reason"] for event in run.events() if event["fact"] == "RestoreFailed"]
    assert len(refused) == 3
    assert refused[-1].startswith("a manifest's signature does not match")
    assert status.state == "finished"
    assert status.lost_steps >= 2
    assert read_result(work.out, NPROC) == undisturbed(work, tmp_path / "clean")


def forge(run: Run, rank: int) -> None:
    """What a stranger who can write to the store can make: a manifest, and a head that names it. Not its key."""
    head = decode_head((_store(run) / "head").read_bytes())
    manifest = decode(manifests(run, rank)[0].read_bytes(), run.directory.signing_key())
    forged = encode(manifest, bytes(32))
    ref = ref_of(manifest, forged)
    (manifests(run, rank)[0].parent / Path(ref.key).name).write_bytes(forged)
    refs = tuple(ref if old.rank == rank else old for old in head.refs)
    (_store(run) / "head").write_bytes(encode_head(replace(head, refs=refs)))


def test_where_nothing_can_be_restored_the_run_ends_and_says_so(tmp_path: Path) -> None:
    run = launch(Workload(out=tmp_path / "out", gates=(5,)), standbys=0)
    stop_at(run, 5)
    for chunk in chunks(run, 0):
        chunk.write_bytes(b"")
    with pytest.raises(
        RunFailed, match=r"no step is left that every rank can restore \(step 5 was finished\)"
    ) as problem:
        rs.resume(run.id).wait(timeout_s=LIMIT_S)
    said(problem)
    assert len([event for event in run.events() if event["fact"] == "RestoreFailed"]) >= 1


def newest_chunk(run: Run, rank: int) -> Path:
    """The chunk that only the newest manifest names."""
    newest, *older = (path.read_text() for path in manifests(run, rank))
    own = [
        path for path in chunks(run, rank) if path.name in newest and not any(path.name in o for o in older)
    ]
    assert len(own) == 1
    return own[0]
