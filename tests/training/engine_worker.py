"""The processes of test_engine and test_group: a zygote that forks a store and ranks for each scenario asked.

Run as a script: reads a JSON object a line, {"id": ..., "scenario": name, ...}; answers each with one line.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta

# DeepSpeed logs to stdout, where the answers go: before it is imported.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import torch.distributed as dist
from engine_scenarios import SCENARIOS

from resilient_sdk.training import engine as door

WORLD = 3


def child(work):
    """Forks; the child answers down a pipe and ends. Returns (pid, reading end)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    answer = {"ok": False}
    try:
        os.close(reading)
        answer = work()
    except BaseException:
        answer = {"ok": False, "error": traceback.format_exc()[-3000:]}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def host_store(ready):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ready, str(store.port).encode())
    while os.getppid() != 1:
        time.sleep(0.2)
    os._exit(0)


def serve(request):
    ports, ready = os.pipe()
    keeper, _ = child(lambda: host_store(ready))
    port = int(os.read(ports, 16))
    function = SCENARIOS[request["scenario"]]

    def work(slot):
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=25))
        return function(request, slot, store)

    children = [child(lambda slot=slot: work(slot)) for slot in range(request.get("processes", WORLD))]
    answers = []
    for pid, reading in children:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        answers.append(json.loads(text) if text else {"ok": False, "died": os.waitstatus_to_exitcode(status)})
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    os.close(ports)
    os.close(ready)
    return answers


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = threading.active_count()
    door.preload()
    threads = len(os.listdir("/proc/self/task"))
    print(
        json.dumps({"threads": threads, "before": before, "cuda": torch.cuda.is_initialized()}),
        file=ANSWERS,
        flush=True,
    )
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"id": request["id"], "answers": serve(request)}), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
