"""The door of a controller: who has the token comes in, nobody else."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from resilient_sdk.errors import RunUnreachable
from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.rpc import resilient_pb2_grpc as pb_grpc
from resilient_sdk.rpc.channels import TOKEN_KEY, Client, Server

TOKEN = "3f" * 32


class Desk:
    """Notes who came in."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.facts: list[pb.FactUp] = []

    def serve(self, facts: Iterator[pb.FactUp]) -> Iterator[pb.CommandDown]:
        for fact in facts:
            self.facts.append(fact)
            yield pb.CommandDown(acknowledged=fact.number, command=fact.fact.upper())

    def status(self) -> dict[str, Any]:
        return {"phase": "stepping"}

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def server(desk: Desk) -> Iterator[Server]:
    opened = Server(desk, TOKEN)
    yield opened
    opened.close()


def test_the_owner_comes_in(server: Server, desk: Desk) -> None:
    client = Client(server.address, TOKEN)
    assert client.status() == {"phase": "stepping"}
    client.stop("enough")
    answers = list(client.serve(iter([pb.FactUp(number=1, fact="a"), pb.FactUp(number=2, fact="b")])))
    client.close()
    assert desk.stopped == ["enough"]
    assert [(answer.acknowledged, answer.command) for answer in answers] == [(1, "A"), (2, "B")]


def test_the_door_is_on_loopback_alone(server: Server) -> None:
    assert server.address.startswith("127.0.0.1:")


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "Status": lambda stub, metadata: stub.Status(pb.StatusRequest(), timeout=5, metadata=metadata),
    "Stop": lambda stub, metadata: stub.Stop(pb.StopRequest(reason="mine"), timeout=5, metadata=metadata),
    "Serve": lambda stub, metadata: list(
        stub.Serve(iter([pb.FactUp(number=1, fact="{}")]), timeout=5, metadata=metadata)
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "metadata",
    [(), ((TOKEN_KEY, ""),), ((TOKEN_KEY, TOKEN[:-1]),), ((TOKEN_KEY, TOKEN.upper()),), (("token", TOKEN),),
     ((TOKEN_KEY + "-bin", TOKEN.encode()),)],
)  # fmt: skip
def test_without_the_token_no_method_answers(
    server: Server, desk: Desk, call: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        CALLS[call](pb_grpc.ControllerStub(channel), metadata)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert desk.stopped == []
    assert desk.facts == []


def test_a_method_that_is_not_there_is_refused_alike(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/resilient_sdk.Controller/Token")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=5)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_wrong_token_is_one_line_for_the_owner(server: Server) -> None:
    client = Client(server.address, "0" * 64)
    with pytest.raises(RunUnreachable, match="refused the token") as refused:
        client.status()
    client.close()
    assert "\n" not in str(refused.value)


def test_nobody_there_is_one_line(server: Server) -> None:
    address = server.address
    server.close()
    client = Client(address, TOKEN)
    for call in (client.status, lambda: client.stop("x"), lambda: list(client.serve(iter([])))):
        with pytest.raises(RunUnreachable, match="does not answer") as refused:
            call()
        assert "\n" not in str(refused.value)
    client.close()


def test_strangers_who_hold_the_line_do_not_keep_the_owner_out(server: Server) -> None:
    """More calls than the server has threads, each opened without the token and never finished."""
    hold = threading.Event()

    def never() -> Iterator[pb.StatusRequest]:
        hold.wait(20)
        yield from ()

    channel = grpc.insecure_channel(server.address)
    stranger = channel.stream_stream(
        "/resilient_sdk.Controller/Status", pb.StatusRequest.SerializeToString, pb.StatusReply.FromString
    )
    held = [stranger(never(), timeout=30) for _ in range(20)]
    client = Client(server.address, TOKEN)
    try:
        for call in held:
            with pytest.raises(grpc.RpcError, match="another owner"):
                next(call)
        assert client.status(timeout_s=2.0) == {"phase": "stepping"}
    finally:
        hold.set()
        client.close()
        channel.close()
