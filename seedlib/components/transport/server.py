"""The server: offers any `PolicyService` on gRPC streams, one session for each stream."""

import hmac
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, runtime_checkable

import grpc
from absl import logging

from seedlib.components.transport import deadlines, messages, options, service, wire
from seedlib.components.transport.listener import Listener, ServerConfig

__all__ = ["NetworkWatcher", "PolicyServer", "ServerConfig"]

# Threads beyond those of streams: for health checks, and to refuse streams beyond the limit.
_SPARE_THREADS = 4
# How long a stop waits, after its grace, for sessions to return from a step that `close` has woken.
_STOP_MARGIN = 5.0


@runtime_checkable
class NetworkWatcher(Protocol):
    """A service whose figures include what its servers pass over the network."""

    def watch_network(self, network_bytes: Callable[[], int]) -> None:
        """Takes over a counter: bytes of time steps and actions since a server's start."""
        ...


class PolicyServer:
    """Listens, and runs one session of the service per stream. Starts once and stops once."""

    def __init__(self, service: service.PolicyService, config: ServerConfig | None = None):
        """Listens to nothing yet.

        Args:
          service: opens the sessions. A session's `close` may be called while its `step` blocks in
            another thread, and must wake it. A `NetworkWatcher` is given `network_bytes`.
          config: settings; the defaults where None.
        """
        self._service = service
        self._config = config or ServerConfig()
        self._slots = threading.BoundedSemaphore(self._config.max_streams)
        self._deadlines = deadlines.Deadlines("transport-server-deadlines")
        self._lock = threading.Lock()
        self._stopping = False
        self._streams: set[_Stream] = set()
        self._bytes_of_ended_streams = 0
        self._all_ended = threading.Condition(self._lock)
        self._listener = Listener(
            "policy server",
            options.SERVICE_NAME,
            (_Handlers(self._serve),),
            self._config.max_streams + _SPARE_THREADS,
            self._config,
        )
        if isinstance(service, NetworkWatcher):
            service.watch_network(lambda: self.network_bytes)

    def __enter__(self) -> "PolicyServer":
        """Starts, and returns itself."""
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops."""
        self.stop()

    @property
    def address(self) -> str:
        """Where it listens, with the real port; "" before `start`."""
        return self._listener.address

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before `start` and for unix sockets."""
        return self._listener.port

    @property
    def network_bytes(self) -> int:
        """Bytes of time steps that came and of actions that were sent, gRPC's own left out."""
        with self._lock:
            return self._bytes_of_ended_streams + sum(s.network_bytes for s in self._streams)

    def start(self) -> str:
        """Listens.

        Returns:
          The address, with the real port.

        Raises:
          OSError: where the address cannot be bound, for example since it is in use.
          RuntimeError: where it was started before.
        """
        if self._stopping:
            raise RuntimeError("a policy server starts only once")
        return self._listener.start()

    def set_serving(self, serving: bool) -> None:
        """Sets what the standard health service says. Not serving until told.

        Raises:
          RuntimeError: before `start`.
        """
        self._listener.set_serving(serving)

    def stop(self, grace: float = 0.5) -> None:
        """Ends all streams and joins all threads. May be called twice.

        Steps under way have `grace` seconds to be answered; then their sessions are closed, which
        wakes them. Clients see the service as unavailable.

        Args:
          grace: seconds.
        """
        with self._lock:
            first, self._stopping = not self._stopping, True
        if not first or not self._listener.end_calls(grace):
            return
        with self._all_ended:
            ended = self._all_ended.wait_for(lambda: not self._streams, _STOP_MARGIN)
            stuck = [stream.name for stream in self._streams]
        if not ended:
            logging.error("policy server stops while steps of %s do not return", stuck)
        self._listener.join(wait=ended)
        self._deadlines.close()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handles one stream, in a thread of the executor."""
        if not self._slots.acquire(blocking=False):
            limit = self._config.max_streams
            _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"all {limit} streams are taken (max_streams)",
            )
        stream = _Stream(context, self._deadlines)
        with self._lock:
            self._streams.add(stream)
        try:
            yield from self._answer(stream, requests, context)
        finally:
            # Also runs where gRPC drops this generator since the stream was cancelled.
            stream.close()
            self._slots.release()
            with self._all_ended:
                self._streams.discard(stream)
                self._bytes_of_ended_streams += stream.network_bytes
                self._all_ended.notify_all()

    def _answer(
        self, stream: "_Stream", requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        stream.limit(self._config.handshake_timeout)
        first = next(requests, None)
        if first is None:
            return
        stream.limit(None)
        hello = self._authenticate(first, context)
        stream.name = f"actor {hello.actor_id!r} ({len(hello.environment_ids)} environments)"
        rows = len(hello.environment_ids)
        request_layout = wire.time_step_layout(hello.observation_spec)
        action_layout = wire.action_layout(hello.action_spec)
        self._check_sizes(request_layout, action_layout, rows, context)
        try:
            session = self._service.open(hello, timeout=self._config.handshake_timeout)
        except Exception as error:
            _abort_with(context, error, stream.name, opening=True)
        stream.attach(session)
        logging.info("%s: session opened", stream.name)
        yield messages.encode_answer(request_layout, action_layout, rows)
        for request in requests:
            stream.network_bytes += len(request)
            if self._stopping:
                _abort(context, grpc.StatusCode.UNAVAILABLE, "the policy server is stopping")
            try:
                time_steps = request_layout.unpack(request, rows)
            except wire.WireError as error:
                _abort(context, grpc.StatusCode.INVALID_ARGUMENT, messages.describe(error))
            try:
                answer = action_layout.pack(session.step(time_steps))
                if len(answer) != action_layout.nbytes(rows):
                    raise wire.WireError(f"expected actions of {rows} rows")
            except Exception as error:
                _abort_with(context, error, stream.name, ended=stream.closed)
            stream.network_bytes += len(answer)
            yield answer

    def _authenticate(self, first: bytes, context: grpc.ServicerContext) -> service.Hello:
        """Returns the hello in the first message; a wrong token is refused before it is parsed."""
        try:
            head = messages.split_hello(first)
        except wire.WireError as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, messages.describe(error))
        if not hmac.compare_digest(head.token, self._config.run_token.encode()):
            logging.warning("refused a stream of %s: wrong run token", context.peer())
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "the run token is missing or wrong")
        if head.version != service.PROTOCOL_VERSION:
            _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol version {head.version} is not this server's {service.PROTOCOL_VERSION}",
            )
        try:
            return messages.decode_hello(head, self._config.max_message_bytes)
        except wire.WireError as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, messages.describe(error))

    def _check_sizes(
        self,
        request: wire.Layout,
        answer: wire.Layout,
        rows: int,
        context: grpc.ServicerContext,
    ) -> None:
        limit = self._config.max_message_bytes
        for name, size in (("request", request.nbytes(rows)), ("answer", answer.nbytes(rows))):
            if size > limit:
                _abort(
                    context,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{name} of {rows} environments has {size} bytes; "
                    f"this server's max_message_bytes is {limit}",
                )


class _Handlers(grpc.GenericRpcHandler):
    """Names the one method; messages stay bytes."""

    def __init__(
        self, serve: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
    ) -> None:
        self._method = grpc.stream_stream_rpc_method_handler(serve)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        return self._method if handler_call_details.method == options.METHOD else None


class _Stream:
    """A stream's session, closed exactly once whatever ends the stream.

    The handler's thread closes it when it gets that far. Where it is blocked in the service while
    its client dies, gRPC calls back and the thread of the deadlines closes the session instead,
    which wakes the handler.
    """

    def __init__(self, context: grpc.ServicerContext, watch: deadlines.Deadlines):
        self.name = "a stream without a hello"
        self.closed = False
        self.network_bytes = 0  # Counted by the handler's thread alone.
        self._context = context
        self._session: service.Session | None = None
        self._lock = threading.Lock()
        self._handshake = watch.add(self._cut_off)
        self._ending = watch.add(self.close)
        # False where the stream is over already: then its requests end, and so does the handler.
        context.add_callback(lambda: self._ending.set(0.0))

    def limit(self, seconds: float | None) -> None:
        """Cancels the stream after `seconds`, or not at all for None."""
        if seconds is None:
            self._handshake.clear()
        else:
            self._handshake.set(seconds)

    def attach(self, session: service.Session) -> None:
        """Takes over a session; closes it at once where the stream has ended meanwhile."""
        with self._lock:
            if not self.closed:
                self._session = session
                return
        self._close(session)

    def close(self) -> None:
        """Closes the session and returns when it is closed, whichever thread does it."""
        self._handshake.remove()
        self._ending.remove()
        with self._lock:
            self.closed = True
            session, self._session = self._session, None
            if session is not None:
                self._close(session)

    def _close(self, session: service.Session) -> None:
        try:
            session.close()
        except Exception:
            logging.exception("%s: closing the session failed", self.name)
        else:
            logging.info("%s: session closed", self.name)

    def _cut_off(self) -> None:
        logging.warning("%s: no hello in time, cancelled", self._context.peer())
        self._context.cancel()


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, messages.shorten(text))
    raise AssertionError("abort raises")


def _abort_with(
    context: grpc.ServicerContext,
    error: Exception,
    name: str,
    opening: bool = False,
    ended: bool = False,
) -> NoReturn:
    """Ends a stream with the status that says what the service raised."""
    text = messages.describe(error)
    if isinstance(error, service.Refused):
        refusal = grpc.StatusCode.FAILED_PRECONDITION
        _abort(context, refusal if opening else grpc.StatusCode.INVALID_ARGUMENT, text)
    if isinstance(error, service.Fenced):
        _abort(context, grpc.StatusCode.ABORTED, text)
    if isinstance(error, service.Unavailable):
        _abort(context, grpc.StatusCode.UNAVAILABLE, text)
    if ended:
        # The session was closed under its step since the client is gone; nobody waits for this.
        logging.info("%s: step ended by the end of its stream: %s", name, text)
    else:
        logging.error("%s: the service failed", name, exc_info=error)
    _abort(context, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {text}")
