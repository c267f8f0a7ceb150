"""What this machine can train on, without torch in the process that asks."""

import subprocess
import sys
from pathlib import Path


def gpu_count() -> int:
    """CUDA devices that a worker would see; asking costs nothing where the machine has none."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    # torch takes seconds to import and must not be in a command's process: it is asked in one of its own.
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return int(asked.stdout) if asked.returncode == 0 else 0
