"""gRPC to a run's controller: loopback only, and a token a run."""

import hmac
import json
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Protocol

import grpc

from resilient_sdk.errors import RunUnreachable
from resilient_sdk.rpc import resilient_pb2 as pb
from resilient_sdk.rpc import resilient_pb2_grpc as pb_grpc

TOKEN_KEY = "resilient-token"  # noqa: S105  # the name of the metadata key, not a token
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    # An idle control plane must notice a dead peer; a proxy from the environment must not see loopback.
    ("grpc.enable_http_proxy", 0),
]


class Desk(Protocol):
    """What a controller does for those who call. Methods may be called from several threads."""

    def serve(self, facts: Iterator[pb.FactUp]) -> Iterator[pb.CommandDown]: ...

    def status(self) -> dict[str, Any]: ...

    def stop(self, reason: str) -> None: ...


class _Doorkeeper(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses every call that does not carry the token, before a byte of it is parsed."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        given = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._token):
            return continuation(details)
        # A stream for any method: a unary handler holds a thread until the stranger has sent its request.
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(_requests: Any, context: Any) -> Iterator[Any]:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "this run has another owner")
    yield


class _Service(pb_grpc.ControllerServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def Serve(self, request_iterator: Any, _context: Any) -> Iterator[pb.CommandDown]:  # noqa: N802  # gRPC's name
        yield from self._desk.serve(request_iterator)

    def Status(self, _request: Any, _context: Any) -> pb.StatusReply:  # noqa: N802
        return pb.StatusReply(state=json.dumps(self._desk.status()))

    def Stop(self, request: Any, _context: Any) -> pb.StopReply:  # noqa: N802
        self._desk.stop(request.reason)
        return pb.StopReply()


class Server:
    """A controller's door, open on a free port of 127.0.0.1 until `close`."""

    def __init__(self, desk: Desk, token: str) -> None:
        self._pool = futures.ThreadPoolExecutor(max_workers=8, thread_name_prefix="rpc")
        self._server = grpc.server(self._pool, interceptors=[_Doorkeeper(token)], options=_OPTIONS)
        pb_grpc.add_ControllerServicer_to_server(_Service(desk), self._server)  # type: ignore[no-untyped-call]  # generated
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(grace=0.5).wait()
        self._pool.shutdown(wait=True)


class Client:
    """A caller's end. Every method raises RunUnreachable when the controller does not answer."""

    def __init__(self, address: str, token: str) -> None:
        self._metadata = ((TOKEN_KEY, token),)
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = pb_grpc.ControllerStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        try:
            reply = self._stub.Status(pb.StatusRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as problem:
            raise _unreachable(problem) from problem
        state: dict[str, Any] = json.loads(reply.state)
        return state

    def stop(self, reason: str, timeout_s: float = 5.0) -> None:
        try:
            self._stub.Stop(pb.StopRequest(reason=reason), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as problem:
            raise _unreachable(problem) from problem

    def serve(self, facts: Iterator[pb.FactUp]) -> Iterator[pb.CommandDown]:
        """An agent's stream; ends, or raises RunUnreachable, when the controller goes."""
        try:
            yield from self._stub.Serve(facts, metadata=self._metadata)
        except grpc.RpcError as problem:
            raise _unreachable(problem) from problem

    def close(self) -> None:
        self._channel.close()


def _unreachable(problem: grpc.RpcError) -> RunUnreachable:
    code, details = problem.code(), problem.details()
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return RunUnreachable(
            "the run's controller refused the token", fix="Only the run's owner may reach it."
        )
    return RunUnreachable(f"the run's controller does not answer ({code.name.lower()}: {details})",
                          fix="If it was killed it comes back by itself; ask again.")  # fmt: skip
