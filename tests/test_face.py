"""What `import resilient_sdk as rs` offers, and what it costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import resilient_sdk as rs

ROOT = Path(rs.__file__).parents[1]
FACE = {"Job", "ResilientError", "Run", "Status", "attach", "job", "launch", "resume", "runs"}


def test_the_face_is_what_it_says() -> None:
    assert set(rs.__all__) == FACE == set(rs._HOMES)
    assert rs.__all__ == sorted(rs.__all__)
    for name in rs.__all__:
        offered = getattr(rs, name)
        assert offered.__module__ == rs._HOMES[name]
        assert offered.__name__ == name
        assert inspect.getdoc(offered)


def test_type_checkers_see_the_same_face() -> None:
    """They read the imports under TYPE_CHECKING, where a missing name would be Any in silence."""
    tree = ast.parse(Path(rs.__file__).read_text())
    seen = {
        alias.name: node.module
        for block in tree.body if isinstance(block, ast.If)
        for node in block.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert seen == rs._HOMES


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lunch'"):
        rs.lunch  # noqa: B018


def test_every_public_method_says_what_it_does() -> None:
    for kind in (rs.Job, rs.Run, rs.Status, rs.ResilientError):
        for name, member in vars(kind).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    "code",
    [
        "import resilient_sdk",
        "import resilient_sdk as rs; rs.attach, rs.launch, rs.resume, rs.Run, rs.Status, list(rs.runs())",
        "import resilient_sdk.runtime.controller",
        "import resilient_sdk.runtime.agent",
        "import resilient_sdk.cli",
    ],
)
def test_who_only_looks_on_does_not_import_torch(code: str, tmp_path: Path) -> None:
    heavy = "('torch', 'deepspeed', 'numpy.testing', 'pandas')"
    look = f"{code}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])"
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", look], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"RESILIENT_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert told.stdout.strip() == "[]"
