"""The server: offers any `PolicyService` on gRPC streams, one session for each stream."""

import concurrent.futures
import dataclasses
import errno
import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc
from absl import logging
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from seedlib.components.transport import deadlines, messages, options, service, wire

# Threads beyond those of streams: for health checks, and to refuse streams beyond the limit.
_SPARE_THREADS = 4
# How long a stop waits, after its grace, for sessions to return from a step that `close` has woken.
_STOP_MARGIN = 5.0


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How a server listens and what it allows.

    Attributes:
      address: `host:port`, `unix:path` or `unix-abstract:name`. Port 0 lets the system choose.
        `localhost` is 127.0.0.1. Any other host than a loopback address needs `credentials`, a
        `run_token` or `allow_insecure`.
      max_streams: sessions at a time. More are refused at once, and may come again.
      max_message_bytes: largest message, either way; the same as the clients'. See
        `wire.message_limit`.
      handshake_timeout: seconds from the start of a stream to the end of its hello, and again to
        open a session at the service.
      keepalive_time: seconds without a byte from a client before it is asked for a sign of life.
      keepalive_timeout: seconds that it has to answer; then its session is closed.
      run_token: a secret that every client must present; "" where there is none.
      credentials: for TLS; None talks in the clear.
      allow_insecure: whether anyone who reaches a network address may open a session.
    """

    address: str = "localhost:0"
    max_streams: int = 256
    max_message_bytes: int = options.DEFAULT_MAX_MESSAGE_BYTES
    handshake_timeout: float = 10.0
    keepalive_time: float = 20.0
    keepalive_timeout: float = 10.0
    run_token: str = dataclasses.field(default="", repr=False)
    credentials: grpc.ServerCredentials | None = dataclasses.field(default=None, repr=False)
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot work or that let strangers in.

        Raises:
          ValueError: naming the field and its value (never the token).
        """
        options.check_address(self.address)
        if self.max_streams < 1:
            raise ValueError(f"max_streams must be at least 1, got {self.max_streams}")
        if not 0 < self.handshake_timeout < float("inf"):
            raise ValueError(
                f"handshake_timeout must be above 0 seconds, got {self.handshake_timeout}"
            )
        options.check_limits(
            self.max_message_bytes,
            self.keepalive_time,
            self.keepalive_timeout,
            wire.MESSAGE_HEADROOM,
        )
        if len(self.run_token.encode()) > messages.MAX_TOKEN_BYTES:
            raise ValueError(f"run_token must have at most {messages.MAX_TOKEN_BYTES} bytes")
        guarded = self.credentials is not None or self.run_token or self.allow_insecure
        if not options.is_local(self.address) and not guarded:
            raise ValueError(
                f"address {self.address} is open to the network: give credentials or a run_token, "
                "or set allow_insecure"
            )


class PolicyServer:
    """Listens, and runs one session of the service per stream. Starts once and stops once."""

    def __init__(self, service: service.PolicyService, config: ServerConfig | None = None):
        """Listens to nothing yet.

        Args:
          service: opens the sessions. A session's `close` may be called while its `step` blocks in
            another thread, and must wake it.
          config: settings; the defaults where None.
        """
        self._service = service
        self._config = config or ServerConfig()
        self._slots = threading.BoundedSemaphore(self._config.max_streams)
        self._deadlines = deadlines.Deadlines("transport-server-deadlines")
        self._lock = threading.Lock()
        self._stopping = False
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._health: health.HealthServicer | None = None
        self._streams: set[_Stream] = set()
        self._all_ended = threading.Condition(self._lock)
        self._address = ""
        self._port = 0

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
        return self._address

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before `start` and for unix sockets."""
        return self._port

    def start(self) -> str:
        """Listens.

        Returns:
          The address, with the real port.

        Raises:
          OSError: where the address cannot be bound, for example since it is in use.
          RuntimeError: where it was started before.
        """
        config = self._config
        if self._server is not None or self._stopping:
            raise RuntimeError("a policy server starts only once")
        host, _, port = config.address.rpartition(":")
        # `localhost` could be bound as ::1 alone while another server has 127.0.0.1.
        address = f"127.0.0.1:{port}" if host == "localhost" else config.address
        _refuse_live_socket(address)
        threads = config.max_streams + _SPARE_THREADS
        executor = concurrent.futures.ThreadPoolExecutor(threads, "transport-server")
        server = grpc.server(
            executor,
            handlers=(_Handlers(self._serve),),
            options=[
                *options.common_options(
                    config.max_message_bytes, config.keepalive_time, config.keepalive_timeout
                ),
                # Two servers on one port would each get half of the clients.
                ("grpc.so_reuseport", 0),
                # Clients choose how often they ask for a sign of life. gRPC would cut off who asks
                # more than once in 5 minutes (three strikes); 0 means that none is counted.
                ("grpc.http2.max_ping_strikes", 0),
            ],
            # What finds no thread is refused and not queued.
            maximum_concurrent_rpcs=threads,
        )
        checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        try:
            if config.credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, config.credentials)
        except RuntimeError as error:
            executor.shutdown()
            raise _cannot_listen(address, str(error)) from None
        if bound == 0:
            executor.shutdown()
            raise _cannot_listen(address, "gRPC gives no reason")
        if not address.startswith("unix"):
            self._port = bound
            address = f"{address.rpartition(':')[0]}:{bound}"
        self._address = address
        self._executor, self._server, self._health = executor, server, checks
        self.set_serving(False)
        server.start()
        if not options.is_local(address) and config.credentials is None:
            logging.warning("policy server listens on %s without TLS", address)
        else:
            logging.info("policy server listens on %s", address)
        return address

    def set_serving(self, serving: bool) -> None:
        """Sets what the standard health service says. Not serving until told.

        Raises:
          RuntimeError: before `start`.
        """
        if self._health is None:
            raise RuntimeError("the policy server is not started")
        status = health_pb2.HealthCheckResponse
        for name in (health.OVERALL_HEALTH, options.SERVICE_NAME):
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self, grace: float = 0.5) -> None:
        """Ends all streams and joins all threads. May be called twice.

        Steps under way have `grace` seconds to be answered; then their sessions are closed, which
        wakes them. Clients see the service as unavailable.

        Args:
          grace: seconds.
        """
        with self._lock:
            first, self._stopping = not self._stopping, True
        if not first or self._server is None or self._executor is None:
            return
        self.set_serving(False)
        # Returns once every stream has its status; their threads may still be in the service.
        self._server.stop(grace).wait(grace + _STOP_MARGIN)
        with self._all_ended:
            ended = self._all_ended.wait_for(lambda: not self._streams, _STOP_MARGIN)
            stuck = [stream.name for stream in self._streams]
        if not ended:
            logging.error("policy server stops while steps of %s do not return", stuck)
        self._executor.shutdown(wait=ended)
        self._deadlines.close()
        logging.info("policy server on %s has stopped", self._address)

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


def _cannot_listen(address: str, reason: str) -> OSError:
    text = messages.shorten(f"cannot listen on {address}; is it in use? ({reason})")
    return OSError(errno.EADDRINUSE, text)


def _refuse_live_socket(address: str) -> None:
    """Refuses the path of a unix socket that a server answers on: gRPC would take it away."""
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:").removeprefix("//")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise _cannot_listen(address, "a server answers there")
