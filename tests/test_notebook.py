"""The notebook runs from top to bottom, and nothing that its kernel does touches a run."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

import resilient_sdk as rs
from tests.process.kit import LIMIT_S, until

ROOT = Path(rs.__file__).parents[1]
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("home", "kernel")]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of this interpreter, whatever kernels the machine has."""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def open_notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def client_of(notebook: Any, cwd: Path) -> NotebookClient:
    return NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": cwd}}
    )


def said(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_it_is_stored_without_outputs() -> None:
    for cell in open_notebook(QUICKSTART).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_quickstart_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = open_notebook(QUICKSTART)
    client_of(notebook, tmp_path).execute()
    text = said(notebook)
    assert "losses identical:  True" in text
    assert "weights identical: True" in text
    assert "0 steps lost" in text
    assert text.count("finished at step 40") == 2
    assert "steps compared: {" in text


LAUNCH = """
import resilient_sdk as rs
from pathlib import Path

def train(job):
    import time, torch
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine = job.initialize(model=lambda: torch.nn.Linear(4, 4),
                            config={"train_micro_batch_size_per_gpu": 2, "optimizer": adamw})
    for step in job.steps(torch.ones(64, 4), until=100):
        with step as batch:
            engine.backward(engine(batch).sum())
            engine.step()
            while step.index == 10 and not Path("open").exists():
                time.sleep(0.02)

run = rs.launch(train, run_id="from-a-kernel", standbys=0)
"""
WAIT = "print('waiting', flush=True)\nrun.wait()"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[NotebookClient]:
    """A kernel with two cells: one launches a run, one waits for it."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in (LAUNCH, WAIT)]
    )
    client = client_of(notebook, tmp_path)
    with client.setup_kernel():
        yield client


def test_a_kernel_that_is_interrupted_restarted_and_ended_leaves_the_run_alone(
    session: NotebookClient, tmp_path: Path
) -> None:
    session.execute_cell(session.nb.cells[0], 0)
    run = rs.attach("from-a-kernel")
    try:
        before = until(run, lambda s: s.step == 10)
        manager, talk = session.km, session.kc
        assert manager is not None
        assert talk is not None
        talk.execute(WAIT)
        time.sleep(0.5)  # it is in run.wait() now
        _sync(manager.interrupt_kernel())
        time.sleep(0.5)
        assert run.status().ranks == before.ranks
        _sync(manager.restart_kernel(now=True))
        assert run.status().ranks == before.ranks
        _sync(manager.shutdown_kernel(now=True))
        assert run.status().ranks == before.ranks
        (tmp_path / "open").touch()
        status = run.wait(timeout_s=LIMIT_S)
    finally:
        run.stop()
    assert (status.state, status.step, status.generation) == ("finished", 100, 1)


def _sync(awaitable: Any) -> None:
    async def wait() -> None:
        await awaitable

    run_sync(wait)()
