"""Offers a learner's parameters and counters to inference in other processes, over gRPC."""

import hmac
import threading
from typing import Any

import grpc
from absl import logging

from seedlib.components.transport import learner_service, messages, wire
from seedlib.components.transport.listener import Listener, ServerConfig

__all__ = ["LearnerServer", "ServerConfig"]


class LearnerServer:
    """Answers exchanges. Starts once and stops once."""

    def __init__(
        self, service: learner_service.LearnerService, config: ServerConfig | None = None
    ) -> None:
        """Listens to nothing yet.

        Args:
          service: the learner.
          config: settings; `max_streams` is how many exchanges run at a time.
        """
        self._service = service
        self._config = config or ServerConfig()
        self._lock = threading.Lock()
        self._packed: tuple[int, bytes] | None = None
        self._layout: wire.Layout | None = None
        self._listener = Listener(
            "learner server",
            learner_service.SERVICE_NAME,
            (_Handlers(self._exchange),),
            min(self._config.max_streams, 8),
            self._config,
        )

    @property
    def address(self) -> str:
        """Where it listens, with the real port; "" before `start`."""
        return self._listener.address

    def start(self) -> str:
        """Listens, and says that it serves. See `Listener.start`."""
        address = self._listener.start()
        self._listener.set_serving(True)
        return address

    def stop(self, grace: float = 0.5) -> None:
        """Ends all exchanges and joins all threads. May be called twice."""
        if self._listener.end_calls(grace):
            self._listener.join()

    def _exchange(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """Handles one exchange, in a thread of the listener."""
        try:
            given = learner_service.token_of(message)
            if not hmac.compare_digest(given, self._config.run_token.encode()):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "run token: missing or another")
            request = learner_service.decode_request(message)
        except wire.WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, messages.shorten(str(error)))
        try:
            version, packed = self._newest(request.known_version)
            assert self._layout is not None
            ours = learner_service.signature_of(self._layout)
            if request.signature != ours:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    messages.shorten(_first_difference(ours, request.signature)),
                )
            go_on = self._service.receive(request.report)
        except grpc.RpcError:
            raise
        except Exception as error:
            if context.code() is None:
                logging.exception("learner server: an exchange failed")
                context.abort(grpc.StatusCode.INTERNAL, messages.describe(error))
            raise
        return learner_service.encode_answer(version, go_on, packed)

    def _newest(self, known_version: int) -> tuple[int, bytes]:
        """Returns the newest version, packed once for all who ask; -1 where it is known."""
        with self._lock:
            version, leaves = self._service.newest()
            if self._layout is None:
                self._layout = learner_service.layout_of(leaves)
            if version == known_version:
                return -1, b""
            if self._packed is None or self._packed[0] != version:
                self._packed = version, self._layout.pack([leaf[None] for leaf in leaves])
            return self._packed


def _first_difference(ours: list[list[Any]], theirs: list[list[Any]]) -> str:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{mine[0]}: expected {mine[1:]}, got {other[0]} {other[1:]}"
    return f"parameters: expected {len(ours)} arrays, got {len(theirs)}"


class _Handlers(grpc.GenericRpcHandler):
    """Names the one method; messages stay bytes."""

    def __init__(self, exchange: Any) -> None:
        self._method = grpc.unary_unary_rpc_method_handler(exchange)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        ours = handler_call_details.method == learner_service.METHOD
        return self._method if ours else None
