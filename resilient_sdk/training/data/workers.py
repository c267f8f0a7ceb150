"""DataLoader workers that die with the rank they serve and hold nothing of it open."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from resilient_sdk.training.data.samples import SeededSamples

_PR_SET_PDEATHSIG = 1


class WorkerInit:
    """First thing in a DataLoader worker, then the user's own worker_init_fn.

    - The kernel kills the worker when the thread that started it ends, however it ends. torch's own
      watchdog looks every 5 s: so long would a killed rank's connections stay open in its workers,
      and so long would its peers wait in their collective.
    - Network connections inherited by the fork are put out of reach, for the same reason: a rank
      that leaves a broken group closes its connections, and its peers must see that.
    """

    def __init__(self, then: Callable[[int], None] | None, *, forked_here: bool) -> None:
        self._then = then
        self._forked_here = forked_here

    def __call__(self, worker: int) -> None:
        _die_with_parent(forked_here=self._forked_here)
        _let_go_of_connections()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededSamples):
            object.__setattr__(
                info, "dataset", info.dataset.inner
            )  # what the user's function expects to find
        if self._then is not None:
            self._then(worker)


def init_for(loader: DataLoader[Any]) -> WorkerInit:
    """Returns the worker_init_fn that keeps `loader`'s own and adds ours; once only."""
    if isinstance(loader.worker_init_fn, WorkerInit):
        return loader.worker_init_fn
    context = loader.multiprocessing_context or multiprocessing
    return WorkerInit(loader.worker_init_fn, forked_here=context.get_start_method() != "forkserver")


def stop(iterator: object) -> None:
    """Stops what an iterator runs: DataLoader workers, or the rest of a generator."""
    for name in ("_shutdown_workers", "close"):
        method = getattr(iterator, name, None)
        if callable(method):
            method()


def _die_with_parent(*, forked_here: bool) -> None:
    parent = multiprocessing.parent_process()
    if not forked_here:
        # The kernel's parent is the fork server, which its children keep alive: only a thread can watch.
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it died before the kernel knew whom to kill with it


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _let_go_of_connections() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _network_sockets():
        # Not close(): an object that still holds the number would later close a stranger's file.
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _network_sockets() -> Iterator[int]:
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory is gone by now
            descriptor = int(entry.name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _family(descriptor) in _NETWORK:
                yield descriptor


_NETWORK = (socket.AF_INET, socket.AF_INET6)


def _family(descriptor: int) -> int:
    borrowed = socket.socket(fileno=descriptor)
    try:
        return borrowed.family
    finally:
        borrowed.detach()
