"""What is shipped is what a user needs, and works where it is installed."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import resilient_sdk

ROOT = Path(resilient_sdk.__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline with the build backend that is installed here."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True, capture_output=True,
    )  # fmt: skip
    (built,) = out.iterdir()
    return built


def git(*which: str) -> set[str]:
    """Files of the package that git tracks, or others; none where this is no checkout."""
    listed = subprocess.run(
        ["/usr/bin/env", "git", "ls-files", *which, "resilient_sdk"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return set(listed.stdout.splitlines())


def test_the_wheel_has_all_that_is_ours_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours, tracked, lying_around = (
        {n for n in names if not n.startswith("resilient_sdk-")},
        git(),
        git("--others"),
    )
    if tracked:
        assert ours - lying_around == tracked
    wanted = (
        "py.typed",
        "checkpoint/FORMAT.md",
        "coordination/PROTOCOL.md",
        "rpc/resilient.proto",
        "rpc/generate.sh",
    )
    assert {f"resilient_sdk/{name}" for name in wanted} <= names
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)
    about = (
        zipfile.ZipFile(wheel).read(f"resilient_sdk-{resilient_sdk.__version__}.dist-info/METADATA").decode()
    )
    assert f"\nVersion: {resilient_sdk.__version__}\n" in about
    assert "\nRequires-Python: >=3.11\n" in about
    assert {"LICENSE"} <= {Path(name).name for name in names}


def test_it_works_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In a virtual environment of its own that sees this one's dependencies, and not this source."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    site = next((place / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet",
         "--force-reinstall", "--disable-pip-version-check", str(wheel)], check=True, cwd=tmp_path,
    )  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    where = run(str(python), "-c", "import resilient_sdk; print(resilient_sdk.__file__)")
    assert where == str(site / "resilient_sdk" / "__init__.py")
    assert run(str(place / "bin" / "resilient"), "version") == resilient_sdk.__version__
    (tmp_path / "train.py").write_text(TRAIN)
    run(str(python), "-c", LAUNCH)


TRAIN = """
import torch
import resilient_sdk as rs
job = rs.job()
adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
engine = job.initialize(model=lambda: torch.nn.Linear(4, 4),
                        config={"train_micro_batch_size_per_gpu": 2, "optimizer": adamw})
for step in job.steps(torch.ones(8, 4), until=2):
    with step as batch:
        engine.backward(engine(batch).sum())
        engine.step()
print("at", job.rank, rs.__file__)
"""
LAUNCH = """
import os, sys
from pathlib import Path
import resilient_sdk as rs
os.environ.update(RESILIENT_HOME=os.path.abspath("runs"), RESILIENT_MEMORY=os.path.abspath("memory"))
run = rs.launch(script="train.py", standbys=0)
assert run.wait(90).state == "finished"
assert f"at 0 {rs.__file__}" in run.logs(0), run.logs(0)
"""


def test_the_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    released = [version for version in versions if version != "Unreleased"]
    assert versions, "no version at all"
    if released:
        assert released[0] == resilient_sdk.__version__
    else:
        assert resilient_sdk.__version__ == "0.1.0", "a version that was released has its heading"
