"""The zygote: imports everything once, then does nothing but fork workers.

It has one thread, no process group and no CUDA, for a fork copies one thread only and CUDA does not survive it.
It forks twice, so that the kernel gives each worker to the agent (a subreaper), which can then wait for it.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    # Hardly anything dies while three thousand modules are imported: collecting meanwhile costs a second.
    gc.disable()

from resilient_sdk.rpc.frames import Channel, ChannelClosed
from resilient_sdk.runtime import worker
from resilient_sdk.runtime.processes import die_with_parent
from resilient_sdk.training.engine import preload


def main(arguments: list[str]) -> None:
    """Serves fork orders from the descriptor `arguments[0]` for the run directory `arguments[1]` until it closes."""
    agent = os.getppid()
    die_with_parent(agent)
    # A worker's crash must not be answered by a handler that the zygote's imports may have set.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = Channel(socket.socket(fileno=int(arguments[0])))
    directory = Path(arguments[1])
    preload()
    gc.enable()
    orders.send({"ready": True})
    while True:
        try:
            order, descriptors = orders.receive_with_fds(2)
        except ChannelClosed:
            return
        pid = _fork_twice(order["worker"], descriptors, directory, agent, orders)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send({"worker": order["worker"], "pid": pid})


def _fork_twice(number: int, descriptors: list[int], directory: Path, agent: int, orders: Channel) -> int:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os.close(reading)
            os.close(writing)
            orders.close()  # else the agent would not see the zygote's end while a worker lives
            _become_worker(number, descriptors, directory, agent)
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    pid = int(os.read(reading, 32))
    os.close(reading)
    return pid


def _become_worker(number: int, descriptors: list[int], directory: Path, agent: int) -> None:
    status = 1
    try:
        channel, log = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setpgid(0, 0)  # with what it forks: a dead rank's children must not outlive it
        _wait_adopted(agent)
        die_with_parent(agent)
        status = worker.main(number, socket.socket(fileno=channel), directory)
    except BaseException:  # noqa: BLE001  # whatever it is, it must reach the log and must not return into the zygote
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait_adopted(agent: int) -> None:
    # Until the process between has ended, this one is not the agent's child yet.
    while os.getppid() != agent:
        os.sched_yield()


if __name__ == "__main__":
    main(sys.argv[1:])
