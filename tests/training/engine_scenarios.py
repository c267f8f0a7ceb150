"""What a rank does in each test of test_engine and test_group: (request, number, store) in, a record out."""

import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from engine_kit import (
    WORLD,
    Net,
    Rank,
    as_bytes,
    config_of,
    copy_of,
    deepspeed,
    digest,
    form,
    leave,
    make_model,
    rehearse,
    spec_of,
    step,
)
from torch import nn

from resilient_sdk.training import engine as door
from resilient_sdk.training import leftovers
from resilient_sdk.training.group import Group, solo_store


def engine_scalars_of(saved):
    return saved[1]["engine"]["skipped_steps"], saved[1]["scaler"].get("cur_scale")


def rollback(args, slot, store):
    rank = Rank(args, slot if slot < WORLD else 1, store)
    keep, last = 2, 5
    if slot < WORLD:
        engine, group = rank.life(0)
        engine.module.drop.train()
        engine.module.middle.eval()
        start = copy_of(engine)
        head = rank.run(engine, 0, keep)
        saved = copy_of(engine)
        reference = rank.run(engine, keep, last)
        # Back to step 0 in the same engine: the optimizer's state must go, not only its values.
        door.load_state(engine, *start)
        again = [rank.run(engine, 0, keep), rank.run(engine, keep, last)]
        assert again == [head, reference], ("same engine", again, head, reference)
        if slot == 1:
            store.set(
                "moved",
                pickle.dumps([as_bytes(saved[0]), saved[1], reference, as_bytes(start[0]), start[1], head]),
            )
        leave(engine, group)
        if slot == 1:
            return {"ok": True}
    else:
        rehearse(rank.spec, rank.dtype)
        moved = pickle.loads(store.get("moved"))
        saved, reference, start, head = (moved[0], moved[1]), moved[2], (moved[3], moved[4]), moved[5]
    engine, group = rank.life(1)
    door.load_state(engine, *saved)
    again = rank.run(engine, keep, last)
    assert again == reference, ("new life", again, reference)
    leave(engine, group)
    engine, group = rank.life(2)
    door.load_state(engine, *start)
    again = [rank.run(engine, 0, keep), rank.run(engine, keep, last)]
    assert again == [head, reference], ("from the start", again, head, reference)
    leave(engine, group)
    skipped, scale = engine_scalars_of(saved)
    return {"ok": True, "lr": reference[2], "loss": reference[0][-1], "skipped": skipped, "scale": scale}


def unequal(args, slot, store):
    """Ranks whose models differ: a build makes them equal, unless it is told that they will be loaded."""

    def own():
        torch.manual_seed(slot)
        return Net()

    spec, sums = door.EngineSpec.from_arguments(model=own, config=config_of(args)), []
    for generation, equal in enumerate((False, True)):
        group = form(store, generation, slot)
        engine = door.build(spec, solo=False, world_size=WORLD, equal_weights=equal)
        group.watch_sockets()
        sums.append(digest(engine)[1])
        leave(engine, group)
    return {"ok": True, "weights": sums}


def fault(args, slot, store):
    """A rank dies or stops inside a step; the others' collective is aborted, a standby takes over."""
    rank = Rank(args, slot if slot < WORLD else 1, store)
    if slot < WORLD:
        engine, group = rank.life(0)
        rank.run(engine, 0, 1)
        saved = copy_of(engine)
        if slot == 1:
            store.set("moved", pickle.dumps([as_bytes(saved[0]), saved[1]]))
        reference = rank.run(engine, 1, 3)
        door.load_state(engine, *saved)
        if slot == 1:
            store.set("reference", pickle.dumps(reference))
            store.set("pid", str(os.getpid()))
            store.set("fault", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL if args["action"] == "kill" else signal.SIGSTOP)
        watcher = threading.Thread(
            target=lambda: (store.clone().wait(["fault"]), time.sleep(0.3), group.abort(), group.abort())
        )
        watcher.start()
        try:
            rank.run(engine, 1, 3)
        except RuntimeError as error:
            raised, seen = time.time() - float(store.get("fault")), f"{type(error).__name__} {error}"[:80]
        else:
            raise AssertionError("the collective went through")
        watcher.join()
        began = time.time()
        leave(engine, group)
        left = time.time() - began
        if args["action"] == "stop" and slot == 0:
            os.kill(int(store.get("pid")), signal.SIGKILL)
    else:
        rehearse(rank.spec, rank.dtype)
        moved = pickle.loads(store.get("moved"))
        saved, reference = (moved[0], moved[1]), pickle.loads(store.get("reference"))
        raised, left, seen = 0.0, 0.0, ""
    engine, group = rank.life(1)
    door.load_state(engine, *saved)
    again = rank.run(engine, 1, 3)
    assert again == reference, ("after the fault", again, reference)
    leave(engine, group)
    return {"ok": True, "raised": raised, "left": left, "seen": seen}


def usage():
    with open("/proc/self/statm") as f:
        rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": rss,
    }


def cycles(args, slot, store):
    rank = Rank(args, slot, store)
    seen, saved = [], None
    for generation in range(args["cycles"]):
        engine, group = rank.life(generation)
        if saved:
            door.load_state(engine, *saved)
        rank.run(engine, 0, 1)
        saved = saved or copy_of(engine)
        leave(engine, group)
        alive = sum(isinstance(o, deepspeed.DeepSpeedEngine) for o in gc.get_objects())
        seen.append({**usage(), "engines": alive})
    for reset in (
        leftovers._reset_zero3,
        leftovers._reset_names,
        leftovers._reset_checkpointing,
        leftovers._reset_backward,
    ):
        reset(deepspeed)  # each works: attempt() would hide one that a newer DeepSpeed breaks
    return {"ok": True, "seen": seen, "linear": torch.nn.functional.linear.__name__}


def first_build(args, slot, store):
    before = set(sys.modules)
    group = Group.form(rank=0, world_size=1, store=solo_store(), timeout_s=60)
    engine = door.build(spec_of(args), solo=True, world_size=WORLD)
    step(engine, 0, 0, 1, torch.bfloat16)
    leave(engine, group)
    return {"ok": True, "new": sorted(set(sys.modules) - before)}


def failed_build(args, slot, store):
    """A user's function that raises leaves a process in which the next build works."""
    broken = {"now": args["where"]}

    def optimizer(params):
        if broken["now"] == "optimizer":
            raise LookupError("the user's own")
        return torch.optim.SGD(params, lr=0.1)

    def scheduler(inner):
        if broken["now"] == "scheduler":
            raise LookupError("the user's own")
        return torch.optim.lr_scheduler.StepLR(inner, 2)

    args = {**args, "client": True, "config": {"zero_allow_untested_optimizer": True}}
    spec = door.EngineSpec.from_arguments(
        model=make_model(args), config=config_of(args), optimizer=optimizer, lr_scheduler=scheduler
    )
    digests = []
    for generation in range(3):
        group = form(store, generation, slot)
        try:
            engine = door.build(spec, solo=False, world_size=WORLD)
        except LookupError:
            group.leave()
            assert not dist.is_initialized()
            broken["now"] = None
            continue
        step(engine, 0, slot, 1, torch.bfloat16)
        digests.append(digest(engine))
        hooks = len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)
        leave(engine, group)
        if not digests[1:]:
            spec = door.EngineSpec.from_arguments(
                model=make_model(args), config=config_of(args), optimizer=optimizer, lr_scheduler=scheduler
            )
    return {"ok": digests[0] == digests[1], "digests": digests, "hooks": hooks}


def rehearsal_undone(args, slot, store):
    spec = spec_of(args)
    model = door._model_for_build(spec)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rehearse(spec, torch.bfloat16)
    after = door._model_for_build(spec).state_dict()
    same = all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    return {"ok": same and before.keys() == after.keys()}


def timeouts(args, slot, store):
    """Every group's timeout; what an abort leaves alone: the store, and what the user connected to later."""
    rank = Rank(args, slot, store)
    engine, group = rank.life(0)
    groups = list(dist.distributed_c10d._world.pg_names)
    seen = [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]
    watched = len(group._watched)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as mine,
    ):
        dist.barrier()
        group.abort()
        with server.accept()[0] as other:
            other.sendall(b"alive")
            heard = mine.recv(5)
    try:
        dist.barrier()
        broken = False
    except RuntimeError:
        broken = True
    leave(engine, group)
    group.abort()
    return {
        "ok": broken,
        "timeouts": seen,
        "watched": watched,
        "store": store.add("alive", 1) > 0,
        "heard": len(heard),
    }


def cancelled(args, slot, store):
    began = time.monotonic()
    try:
        form(
            store,
            0,
            slot,
            timeout_s=60 if slot == 0 else 0.2,
            cancelled=lambda: slot == 0 and store.check(["end"]),
        )
    except Exception as error:
        if slot:
            store.set("end", "1")
        return {"ok": True, "error_kind": type(error).__name__, "after": time.monotonic() - began}
    return {"ok": False}


def dies_while_forming(args, slot, store):
    """Rank 1 is gone before it gave its address, `when` the world group or the engine's groups are made."""
    made = []
    began = None

    def watch():
        while not store.check(["gone"]):
            time.sleep(0.01)
        time.sleep(0.3)
        store.set("over", "1")
        for group in made:
            group.abort()

    if slot == 1:
        if args["when"] == "world":
            dist.PrefixStore("g0", store).add("resilient/come", 1)
        else:
            form(store, 0, 1)
        store.set("pid", str(os.getpid()))
        store.set("gone", str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP if args["when"] == "engine, stopped" else signal.SIGKILL)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        group = form(store, 0, slot, timeout_s=20, cancelled=lambda: store.check(["over"]))
        made.append(group)
        door.build(spec_of(args), solo=False, world_size=WORLD)
    except Exception as error:
        began = time.time() - float(store.get("gone"))
        kind, text = type(error).__name__, str(error)
    watcher.join()
    if slot == 0 and args["when"] == "engine, stopped":
        os.kill(int(store.get("pid")), signal.SIGKILL)
    for one in made:
        one.leave()
    return {"ok": True, "error_kind": kind, "text": text[:150], "after": began}


def refused(args, slot, store):
    """What from_arguments says to each case: a name, changes to the config, further arguments by name."""
    model = Net()
    made = {
        "optimizer instance": {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
        "optimizer number": {"optimizer": 3},
        "scheduler instance": {
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 2),
        },
        "data": {"training_data": [1, 2]},
        "mpu": {"mpu": object()},
        "unknown argument": {"modle": model},
        "no model": {"model": None},
        "parameters of no model": {"model": Net, "model_parameters": list(model.parameters())},
        "moe": {"model": moe_model()},
        "missing file": {"config": "/nowhere/ds.json"},
    }
    answers = {}
    for name, change in args["cases"].items():
        config = merge(config_of({"stage": change.pop("stage", 2)}), change)
        arguments = {"model": model, "config": config, **made.get(name, {})}
        try:
            door.EngineSpec.from_arguments(**arguments)
            answers[name] = None
        except Exception as error:
            answers[name] = [type(error).__name__, str(error)]
    return {"ok": True, "answers": answers}


def moe_model():
    class MoE(deepspeed.moe.layer.MoE):
        def __init__(self):
            nn.Module.__init__(self)

    return nn.Sequential(MoE())


def merge(config, change):
    for key, value in change.items():
        if value == "remove":
            config.pop(key, None)
        elif isinstance(value, dict):
            config[key] = merge(dict(config.get(key) or {}), value)
        else:
            config[key] = value
    return config


def accepted(args, slot, store):
    """The arguments of deepspeed.initialize that must go through, and what the spec says of them."""
    path = args["file"]
    with open(path, "w") as file:
        json.dump(config_of({"stage": 1, "gas": 4}), file)
    spec = door.EngineSpec.from_arguments(model=Net(), config=path, model_parameters=iter(Net().parameters()))
    config = config_of({"stage": 3})
    kept = json.dumps(config)
    three = door.EngineSpec.from_arguments(
        model=Net, config_params=config, args=None, dist_init_required=False
    )
    return {
        "ok": json.dumps(config) == kept and len(spec.model_parameters) > 4,
        "stage": [spec.zero_stage, three.zero_stage],
        "sizes": [spec.micro_batch_size(WORLD), spec.accumulation_steps(WORLD)],
    }


def misfit(args, slot, store):
    """A state that is not this engine's is refused by name, never loaded in part without a word."""
    rank = Rank(args, slot, store)
    engine, group = rank.life(0)
    rank.run(engine, 0, 1)
    tensors, scalars = copy_of(engine)
    master = next(key for key in tensors if key.startswith("master/"))
    cases = {
        "missing": ({k: v for k, v in tensors.items() if k != master}, scalars),
        "unknown": ({**tensors, "master/99": tensors[master]}, scalars),
        "short": ({**as_bytes(tensors), master: np.zeros(7, np.uint8)}, scalars),
        "dtype": ({**tensors, master: tensors[master].double()}, scalars),
        "kind": (tensors, {**scalars, "kind": "plain"}),
        "format": (tensors, {**scalars, "format": 99}),
        "shape": (tensors, {**scalars, "tensors": {**scalars["tensors"], master: ("float32", (5,))}}),
        "no scheduler": (tensors, {**scalars, "scheduler": None}),
    }
    answers = {}
    for name, (some, numbers) in cases.items():
        try:
            door.load_state(engine, some, numbers)
            answers[name] = None
        except Exception as error:
            answers[name] = type(error).__name__
        dist.barrier()
    door.load_state(engine, tensors, scalars)
    leave(engine, group)
    return {"ok": True, "answers": answers, "scalar_bytes": len(pickle.dumps(scalars))}


def bench(args, slot, store):
    rank = Rank(args, slot, store)
    x, times, saved = torch.randn(2, 8, dtype=rank.dtype), [], None
    for generation in range(args.get("cycles", 5)):
        marks = [time.perf_counter()]
        group = form(store, generation, slot)
        marks.append(time.perf_counter())
        engine = door.build(rank.spec, solo=False, world_size=WORLD)
        marks.append(time.perf_counter())
        group.watch_sockets()
        marks.append(time.perf_counter())
        if saved:
            door.load_state(engine, *saved)
        marks.append(time.perf_counter())
        engine.backward(engine(x))
        engine.step()
        marks.append(time.perf_counter())
        state = door.state_of(engine)
        marks.append(time.perf_counter())
        saved = saved or copy_of(engine)
        dist.barrier()
        marks.append(time.perf_counter())
        leave(engine, group)
        marks.append(time.perf_counter())
        names = ("form", "build", "watch", "load", "step", "state", "copy", "tear_down")
        times.append({n: round(b - a, 4) for n, a, b in zip(names, marks, marks[1:], strict=False)})
        del state
    return {"ok": True, "times": times, "parameters": sum(p.numel() for p in make_model(args)().parameters())}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(rollback, fault, cycles, first_build, failed_build, rehearsal_undone),
        *(timeouts, cancelled, dies_while_forming, refused, accepted, misfit, bench, unequal),
    )
}
