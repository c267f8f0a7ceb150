"""What is committed is what resilient.proto makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_sdk import rpc

ROOM = Path(rpc.__file__).parent


def test_the_generated_files_are_what_the_script_makes(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is in the dev group")
    subprocess.run(
        ["/bin/sh", str(ROOM / "generate.sh"), str(tmp_path)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, check=True,
    )  # fmt: skip
    made = sorted((tmp_path / "resilient_sdk" / "rpc").iterdir())
    assert [path.name for path in made] == [
        "resilient_pb2.py", "resilient_pb2.pyi", "resilient_pb2_grpc.py",
    ]  # fmt: skip
    for path in made:
        assert path.read_text() == (ROOM / path.name).read_text(), f"run generate.sh: {path.name} differs"
