"""The command with real runs. One file, to be read from the top as a user's day with it."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import resilient_sdk
from resilient_sdk.runtime.run import attach
from tests.cli.conftest import SCRIPT, Cli, interrupt, read_until


def test_help_is_quick_and_without_torch(cli: Cli) -> None:
    before = _processor_seconds()
    helped = cli("--help")
    took = _processor_seconds() - before  # not the clock's: the machine may be busy with other tests
    assert helped.returncode == 0
    assert "Exit status: 0 finished" in helped.stdout
    assert took < 1.5
    code = "import sys, resilient_sdk.cli; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(resilient_sdk.__file__).parents[1])
    assert cli("version").stdout == resilient_sdk.__version__ + "\n"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_script_runs_with_torchruns_options_and_its_own(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ran = cli("run", "--nproc_per_node=2", "--standbys", "0", "--store", str(store), "--run-id", "mine",
              SCRIPT, "--last_step", "3", "--seconds=0")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "rank 0 did step 3 of 3\n" in ran.stdout
    assert "rank 1" not in ran.stdout
    assert "run started: 2 ranks, 0 on standby" in ran.stderr
    assert "generation 1: 2 ranks at step 0" in ran.stderr
    assert ran.stderr.endswith("finished at step 3\n")
    assert any(store.iterdir())

    listed = cli("ps").stdout.splitlines()
    assert listed[0].split() == ["RUN", "STATE", "STEP", "RANKS", "STANDBYS", "READY", "AGE"]
    assert listed[1].split()[:3] == ["mine", "finished", "3"]
    told = json.loads(cli("status", "mine", "--json").stdout)
    assert (told["state"], told["step"], told["committed"], told["lost_steps"]) == ("finished", 3, 3, 0)
    assert "finished at step 3" in cli("status", "mine").stdout
    assert cli("logs", "mine", "--rank", "1").stdout.endswith("rank 1 is done\n")
    assert cli("logs", "mine", "--follow").stdout.count("rank 0 did step") == 3
    assert (
        cli("logs", "mine", "--rank", "2").stderr
        == "resilient: run mine has no rank 2. Its ranks are 0 to 1.\n"
    )
    assert cli("attach", "mine").returncode == 0
    again = cli("run", "--run-id", "mine", SCRIPT)
    assert (again.returncode, "run mine exists" in again.stderr) == (2, True)
    assert "run mine has finished" in cli("run", "--resume", "mine").stderr


def test_ctrl_c_detaches_and_the_run_goes_on_until_it_is_stopped(cli: Cli) -> None:
    script = (SCRIPT, "--last_step", "100000", "--seconds", "0.05")
    following = cli.start("run", "--nproc-per-node", "2", "--run-id", "long", *script)
    read_until(following, "rank 0 did step 2 ")
    status, said = interrupt(following)
    assert status == 0
    assert "resilient attach long" in said
    assert "resilient stop long" in said

    before = attach("long").status()
    assert before.state == "running"
    assert "running" in cli("ps").stdout
    looking = cli.start("attach", "long")
    read_until(looking, "rank 0 did step")
    os.kill(attach("long").status().ranks[1] or 0, signal.SIGKILL)
    told = read_until(looking, "recovered: step")
    assert "rank 1 is lost: it was killed by signal 9" in told
    assert "takes rank 1" in told
    assert interrupt(looking)[0] == 0

    following = cli.start("attach", "long")
    read_until(following, "rank 0 did step")
    stopped = cli("stop", "long")
    assert stopped.returncode == 0
    assert "run long is stopped" in stopped.stderr
    rest, _ = following.communicate(timeout=30)
    assert following.returncode == 9
    assert "resilient run --resume long" in rest
    assert attach("long").status().step > before.step
    assert "had ended" in cli("stop", "long").stderr


def test_detached_from_the_start_and_resumed_after_a_stop(cli: Cli) -> None:
    started = cli(
        "run", "--detach", "--nproc-per-node", "2", SCRIPT, "--last_step", "60", "--seconds", "0.05"
    )
    assert started.returncode == 0
    ident = started.stdout.strip()
    read_until(cli.start("attach", ident), "rank 0 did step [5-9]")
    assert cli("stop", ident).returncode == 0
    committed = attach(ident).status().committed
    assert committed is not None
    assert committed < 60
    other = cli("run", "--resume", ident, "--nproc-per-node", "7")
    assert other.returncode == 2
    assert "has 2 ranks, and to go on with 7 is not possible yet" in other.stderr
    resumed = cli("run", "--resume", ident)
    assert resumed.returncode == 0, resumed.stderr
    assert "run resumed" in resumed.stderr
    assert f"rank 0 did step {committed + 1} of 60" in resumed.stdout
    assert f"rank 0 did step {committed} of 60" not in resumed.stdout
    assert attach(ident).status().state == "finished"


def test_a_users_bug_ends_the_run_with_the_first_traceback(cli: Cli) -> None:
    ran = cli("run", "--nproc-per-node", "2", SCRIPT, "--fail-at", "2")
    assert ran.returncode == 1
    assert "The first traceback is rank 1's, at step" in ran.stderr
    assert 'raise ValueError("a bug of the user\'s")' in ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("resilient: run ")
    assert "ValueError on rank 1" in last


def test_without_a_standby_the_run_stops_with_its_state_committed(cli: Cli) -> None:
    script = (SCRIPT, "--last_step", "100000", "--seconds", "0.05")
    options = ("--nproc-per-node", "2", "--standbys", "0", "--max-restarts", "0", "--run-id", "alone")
    following = cli.start("run", *options, *script)
    read_until(following, "rank 0 did step 3 ")
    os.kill(attach("alone").status().ranks[1] or 0, signal.SIGKILL)
    said, _ = following.communicate(timeout=60)
    assert following.returncode == 5
    assert "no standby is left for rank 1" in said
    assert "resilient run --resume alone" in said.splitlines()[-1]
