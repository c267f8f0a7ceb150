"""Was it a peer, or the user's own code? Told from where a thread stands or where an exception came from."""

import re
import sys
from types import TracebackType

_COLLECTIVE_FILES = re.compile(r"[/\\](torch[/\\]distributed|deepspeed[/\\]comm)[/\\]")
_WAITING_FILES = re.compile(
    r"[/\\](torch[/\\]distributed|deepspeed)[/\\]|[/\\]resilient_sdk[/\\]training[/\\]group\.py$"
)
_SLEEPING_FILE = re.compile(r"[/\\]resilient_sdk[/\\]clock\.py$")
_COLLECTIVE_WORDS = re.compile(
    r"\bgloo\b|\bnccl|connection (closed|reset|refused)|broken pipe|process group", re.I
)


def in_collective(thread: int) -> bool:
    """Whether the thread's innermost Python frame is torch.distributed's or DeepSpeed's.

    DeepSpeed waits for asynchronous collectives in its own files, so those count as waiting, too. A rank that
    sleeps in a data loader or in the user's code is told from its peers by this.
    """
    frame = sys._current_frames().get(thread)
    if frame is not None and _SLEEPING_FILE.search(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _WAITING_FILES.search(frame.f_code.co_filename) is not None


def from_collective(problem: BaseException) -> bool:
    """Whether the exception came out of a collective, so that a peer's death may be behind it."""
    file = _innermost_file(problem.__traceback__)
    if _COLLECTIVE_FILES.search(file):
        return True
    return isinstance(problem, RuntimeError) and _COLLECTIVE_WORDS.search(str(problem)) is not None


def _innermost_file(trace: TracebackType | None) -> str:
    file = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return file
