"""One membership of the job: forming its process groups, breaking out of a dead collective, leaving."""

import os
import socket
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from resilient_sdk.clock import SYSTEM_CLOCK, Clock
from resilient_sdk.errors import CoordinationError, StaleGeneration

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        HashStore,
        Store,
    )  # torch.distributed does not say that it exports them
else:
    from torch.distributed import HashStore, Store

_FDS = Path("/proc/self/fd")
_POLL_S = 0.002
# torch's C++ keeps a Python store alive by halves: without a reference here its methods are gone.
_held: list[Store] = []


def choose_backend() -> str:
    """nccl where there is a CUDA device, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def solo_store() -> Store:
    """A store in this process's memory, for a rehearsal in a group of one."""
    return HashStore()


class Group:
    """One membership, from `form` to `leave`. Only `abort` may be called from another thread."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, *, keep_ports: Collection[int] = ()
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._keep_ports = frozenset(keep_ports)
        self._before = _socket_inodes()
        self._watched: frozenset[int] = frozenset()
        self._complete = False
        self._left = False
        self._aborted = False

    @classmethod
    def form(  # noqa: PLR0913 (keywords, and most have a default)
        cls,
        *,
        rank: int,
        world_size: int,
        store: Store,
        timeout_s: float,
        local_rank: int | None = None,
        keep_ports: Collection[int] = (),
        cancelled: Callable[[], bool] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Group":
        """Waits for all ranks, then forms the world group in milliseconds.

        store: under a prefix never used before; an old prefix hangs on dead addresses (pytorch issue 55967).
        timeout_s: seconds, for the ranks to come and for every collective after. local_rank: the device, else
        rank. keep_ports: TCP ports whose connections `abort` spares (the store's own port is always spared).
        cancelled: asked every 2 ms while this rank waits for others, here and when the engine makes groups.
        Raises StaleGeneration when cancelled, CoordinationError when ranks do not come in time.
        """
        export_rank(rank, world_size, local_rank)
        group = cls(rank, world_size, timeout_s, keep_ports={*keep_ports, *_store_ports(store)})

        def over() -> bool:
            return group._aborted or (cancelled is not None and cancelled())

        try:
            if world_size > 1:
                _wait_for_all(store, world_size, timeout_s, over, clock)
                if choose_backend() == "gloo":  # nccl's C++ asks for a TCPStore's own features
                    store = _BreakableStore(store, group._timeout, over, clock)
                    _held[:] = [store]
            dist.init_process_group(
                choose_backend(), store=store, rank=rank, world_size=world_size, timeout=group._timeout
            )
        except (RuntimeError, ValueError) as error:
            group.leave()
            if over():
                raise StaleGeneration("the generation ended while its group was formed") from error
            raise CoordinationError(
                f"rank {rank} of {world_size} could not form the group: {error}"
            ) from error
        group.watch_sockets()
        group._complete = False  # the engine's own groups are still to come
        return group

    def watch_sockets(self) -> None:
        """Call again after the engine is built: it makes groups of its own.

        Records the connected TCP sockets opened since `form` began, by inode; never a listener (shutting one
        down crashes gloo), never the store's connection. What is opened later is the user's, and spared. Also
        gives every group the timeout: DeepSpeed's new_group passes none, so torch's 30 minutes would hold.
        """
        self._watched = _connected_since(self._before, self._keep_ports)
        self._complete = True
        for group in list(distributed_c10d._world.pg_names):
            with suppress(RuntimeError, ValueError, AttributeError):
                distributed_c10d._set_pg_timeout(self._timeout, group)

    def all_able(self, able: bool, step: int) -> bool:
        """Whether every rank can load `step`. Collective.

        Raises CoordinationError if ranks speak of different steps: an order was repeated to some of them.
        """
        device = torch.device("cuda") if choose_backend() == "nccl" else torch.device("cpu")
        lowest = torch.tensor([int(able), step, -step], device=device)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        agreed, least, most = (int(number) for number in lowest.tolist())
        if least != -most:
            raise CoordinationError(f"ranks restore different steps, {least} to {-most}")
        return agreed == 1

    def abort(self) -> None:
        """Makes a collective that blocks the main thread raise, within milliseconds. Never raises itself.

        From another thread. gloo has no abort: its connections are shut down. nccl: each communicator aborts.
        Harmless when called twice, or when nothing blocks; the group is then to be left.
        """
        if self._left:
            return
        self._aborted = True  # ends a wait in the store, where a rank is met that died before it connected
        if dist.is_nccl_available() and torch.cuda.is_available():
            _abort_nccl()
        watched = self._watched
        if not self._complete:
            watched |= _connected_since(self._before, self._keep_ports)
        for inode, descriptor in _descriptors():
            if inode in watched:
                _shut_down(descriptor, inode)

    def leave(self) -> None:
        """Main thread, after engine.tear_down (which resets DeepSpeed's own groups): nothing remains."""
        self._left = True
        self._watched = frozenset()
        if dist.is_initialized():
            dist.destroy_process_group()
        _held.clear()


def export_rank(rank: int, world_size: int, local_rank: int | None = None) -> None:
    """Tells the environment, as torchrun does, which rank this process is."""
    local = local_rank if local_rank is not None else rank % max(1, torch.cuda.device_count() or world_size)
    environment = os.environ  # noqa: TID251 (DeepSpeed and gloo read these, nobody passes them on)
    environment.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local))
    environment["LOCAL_WORLD_SIZE"] = str(world_size if local_rank is None else max(local + 1, 1))
    if choose_backend() == "gloo":
        # Else gloo takes the address the host's name resolves to, which may not be reachable, or be reachable
        # from outside.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("TP_SOCKET_IFNAME", "lo")


def _wait_for_all(
    store: Store,
    world_size: int,
    timeout_s: float,
    over: Callable[[], bool],
    clock: Clock,
) -> None:
    # Before init_process_group, which takes the first rank that is missing for all of its time.
    deadline = clock.monotonic() + timeout_s
    come = store.add("resilient/come", 1)
    while come < world_size:
        if over():
            raise StaleGeneration(f"{come} of {world_size} ranks had come when the generation ended")
        if clock.monotonic() > deadline:
            raise CoordinationError(f"{come} of {world_size} ranks came within {timeout_s:g} s")
        clock.sleep(_POLL_S)
        come = store.add("resilient/come", 0)


class _BreakableStore(Store):
    """The store that torch gets: its waits end when the generation does.

    gloo waits in the store for the address of a rank, for 30 minutes in DeepSpeed's groups; a rank that died
    before it gave its address has no connection that could be shut down.
    """

    def __init__(self, inner: Store, timeout: timedelta, over: Callable[[], bool], clock: Clock) -> None:
        super().__init__()
        self._inner, self._limit, self._over, self._clock = inner, timeout, over, clock

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = min(timeout or self._limit, self._limit).total_seconds()
        deadline = self._clock.monotonic() + limit
        while not self._inner.check(keys):
            if self._over():
                raise RuntimeError("the process group was aborted while it was formed")
            if self._clock.monotonic() > deadline:
                raise RuntimeError(f"the process group was not formed within {limit:g} s")
            self._clock.sleep(_POLL_S)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit


def _store_ports(store: Any) -> set[int]:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return {store.port} if hasattr(store, "port") else set()


def _abort_nccl() -> None:
    for group in list(distributed_c10d._world.pg_names):
        with suppress(RuntimeError, ValueError, AttributeError):
            group._get_backend(torch.device("cuda")).abort()


def _descriptors() -> list[tuple[int, int]]:
    """(inode, descriptor) of every socket of this process."""
    found = []
    for name in os.listdir(_FDS):  # noqa: PTH208 (names of descriptors, some gone by now)
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.append((status.st_ino, int(name)))
    return found


def _socket_inodes() -> frozenset[int]:
    return frozenset(inode for inode, _ in _descriptors())


def _connected_since(before: frozenset[int], keep_ports: frozenset[int]) -> frozenset[int]:
    """Inodes of connected TCP sockets that are not in `before` and use none of the ports."""
    found = set()
    for inode, descriptor in _descriptors():
        if inode in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                continue
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if keep_ports.isdisjoint((own.getsockname()[1], own.getpeername()[1])):
                found.add(inode)
    return frozenset(found)


def _shut_down(descriptor: int, inode: int) -> None:
    # gloo may close it and something else take its number meanwhile: hold it first, then look what it is.
    with suppress(OSError):
        held = os.dup(descriptor)
        if os.fstat(held).st_ino != inode:
            os.close(held)
            return
        with socket.socket(fileno=held) as own:
            own.shutdown(socket.SHUT_RDWR)
