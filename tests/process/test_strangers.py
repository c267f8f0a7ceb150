"""A stranger on the same machine can neither read nor steer a run."""

import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

import resilient_sdk as rs
from resilient_sdk.errors import RunNotFound
from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.rpc import resilient_pb2_grpc as pb_grpc
from resilient_sdk.rpc.channels import TOKEN_KEY
from resilient_sdk.runtime.run import Run
from tests.process.kit import NPROC, at_gate, family, finish, launch, process, undisturbed
from tests.process.workload import Workload, read_result

NOBODY = 65534


@dataclass(frozen=True)
class Open:
    """A run that waits at a gate, every rank and a standby at work."""

    run: Run
    work: Workload

    @property
    def pids(self) -> list[int]:
        controller, agent = process(self.run, "controller").pid, process(self.run, "agent").pid
        return [controller, agent, *family(agent)]

    @property
    def memory(self) -> Path:
        return Path(self.run.directory.settings().memory)


def world(path: Path) -> Iterator[Path]:
    yield path
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))


def test_a_stranger_can_neither_read_nor_steer(home: Path, tmp_path: Path) -> None:
    """All in one run, which comes to its end as if nobody had tried."""
    assert home
    old = os.umask(0)  # the loosest there is: what is private is private all the same
    try:
        run = launch(Workload(out=tmp_path / "out", gates=(5,)))

        def during(run: Run) -> None:
            at_gate(run, 5)
            opened = Open(run, Workload(out=tmp_path / "out"))
            everything_is_private(opened)
            every_socket_is_on_loopback(opened)
            the_door_wants_the_token(opened)
            another_user_cannot_get_in(opened)

        status = finish(run, during)
    finally:
        os.umask(old)
    assert (status.state, status.generation) == ("finished", 1)
    assert read_result(tmp_path / "out", NPROC) == undisturbed(
        Workload(out=tmp_path / "out"), tmp_path / "clean"
    )


def everything_is_private(opened: Open) -> None:
    paths = [*world(opened.run.directory.path), *world(opened.memory)]
    assert any("slot" in path.name for path in paths)
    assert any("generation-" in path.name for path in paths)
    loose = [
        (str(path), oct(stat.S_IMODE(path.stat().st_mode)))
        for path in paths
        if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)
    ]
    assert loose == []
    assert stat.S_IMODE(opened.run.directory.path.parent.stat().st_mode) == 0o700


def every_socket_is_on_loopback(opened: Open) -> None:
    inodes = set()
    for pid in opened.pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                addresses.append((table, fields[1].partition(":")[0], fields[3]))
    listeners = [address for address in addresses if address[2] == "0A"]
    assert len(listeners) >= 1 + NPROC  # the door, and a listener of each rank
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert [address for address in addresses if address[1] not in loopback] == []


def the_door_wants_the_token(opened: Open) -> None:
    record = opened.run.directory.read("controller.json")
    assert record is not None
    calls: list[Callable[..., object]] = [
        lambda stub, told: stub.Status(pb.StatusRequest(), timeout=5, metadata=told),
        lambda stub, told: stub.Stop(pb.StopRequest(reason="mine"), timeout=5, metadata=told),
        lambda stub, told: list(stub.Serve(iter([pb.FactUp(fact="{}")]), timeout=5, metadata=told)),
    ]
    with grpc.insecure_channel(record["address"]) as channel:
        stub = pb_grpc.ControllerStub(channel)
        for told in ((), ((TOKEN_KEY, "0" * 64),)):
            for call in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call(stub, told)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    # Nor does what is not gRPC at all disturb it.
    host, port = record["address"].split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(bytes(range(256)) * 64)
    assert opened.run.status().state == "running"


def another_user_cannot_get_in(opened: Open) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    directory = opened.run.directory.path
    doors: list[Callable[[], object]] = [
        lambda: list(directory.iterdir()),
        (directory / "token").read_text,
        lambda: (directory / "resume").touch(),
        (directory / "entry.pkl").read_bytes,
        lambda: (directory / "entry.pkl").write_bytes(b""),
        lambda: list(opened.memory.iterdir()),
        lambda: (opened.memory / "rank-00000" / "slot-0").read_bytes(),
        opened.memory.rmdir,
        *(lambda pid=pid: os.kill(pid, 0) for pid in opened.pids),
        *(lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir()) for pid in opened.pids),
        *(lambda pid=pid: Path(f"/proc/{pid}/mem").read_bytes() for pid in opened.pids),
    ]
    assert as_nobody(doors) == ["PermissionError"] * len(doors)


def as_nobody(doors: list[Callable[[], object]]) -> list[str]:
    """What becomes of each try in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(writing, pickle.dumps([_try(door) for door in doors]))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        told: list[str] = pickle.loads(answers.read())
    os.waitpid(child, 0)
    return told


def _try(door: Callable[[], object]) -> str:
    try:
        door()
    except OSError as problem:
        return type(problem).__name__
    return "came in"


def test_another_users_run_is_not_taken_for_ones_own(home: Path) -> None:
    """Its function would be unpickled, and its state."""
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    path = home / "runs" / "run-00000000"
    path.mkdir(parents=True, mode=0o700)
    (path / "run.json").write_text("{}")
    (path / "entry.pkl").write_bytes(pickle.dumps(print))
    os.chown(path, NOBODY, NOBODY)
    for ask in (rs.attach, rs.resume):
        with pytest.raises(RunNotFound, match=f"belongs to user {NOBODY}"):
            ask("run-00000000")
