"""The client: a `PolicyService` whose inference happens at the other end of a gRPC stream."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import dm_env
import grpc

from seedlib import types
from seedlib.components.transport import deadlines, messages, options, service, streams, wire

_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclasses.dataclass(frozen=True)
class ClientConfig:
    """How a client talks to its server.

    Attributes:
      open_timeout: seconds that opening a session may take where the caller names none; a server
        that starts meanwhile is found.
      step_timeout: seconds that an answer may take where the caller names none.
      close_timeout: seconds that closing a session waits for the server to have freed its rows.
      max_message_bytes: largest message, either way; the same as the server's.
      keepalive_time: seconds without a byte from the server before it is asked for a sign of life.
      keepalive_timeout: seconds that it has to answer.
      credentials: for TLS; None talks in the clear.
      direct: whether to use the cheaper stream (see `streams`).
    """

    open_timeout: float = 30.0
    step_timeout: float = 60.0
    close_timeout: float = 2.0
    max_message_bytes: int = options.DEFAULT_MAX_MESSAGE_BYTES
    keepalive_time: float = 20.0
    keepalive_timeout: float = 10.0
    credentials: grpc.ChannelCredentials | None = dataclasses.field(default=None, repr=False)
    direct: bool = True

    def __post_init__(self) -> None:
        """Refuses settings that cannot work.

        Raises:
          ValueError: naming the field and its value.
        """
        for name in ("open_timeout", "step_timeout", "close_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 seconds, got {value}")
        options.check_limits(
            self.max_message_bytes,
            self.keepalive_time,
            self.keepalive_timeout,
            wire.MESSAGE_HEADROOM,
        )


class RemotePolicyService:
    """Opens sessions at a `PolicyServer`. A `service.PolicyService`; threads may share it.

    Nothing is started before the first `open`, so a process may fork until then.
    """

    def __init__(self, address: str, config: ClientConfig | None = None):
        """Connects nothing yet.

        Args:
          address: `host:port`, `unix:path` or `unix-abstract:name`.
          config: settings; the defaults where None.

        Raises:
          ValueError: where `address` is none.
        """
        options.check_address(address)
        self._address = address
        self._config = config or ClientConfig()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._sessions: set[RemoteSession] = set()
        self._deadlines = deadlines.Deadlines("transport-client-deadlines")
        self._closed = False

    def __enter__(self) -> "RemotePolicyService":
        """Returns itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes it."""
        self.close()

    def open(self, hello: service.Hello, timeout: float | None = None) -> "RemoteSession":
        """Opens a session. See `service.PolicyService.open`."""
        timeout = self._config.open_timeout if timeout is None else timeout
        try:
            first = messages.encode_hello(hello)
            request = wire.time_step_layout(hello.observation_spec)
            answer = wire.action_layout(hello.action_spec)
        except wire.WireError as error:
            raise service.Refused(str(error)) from error
        rows = len(hello.environment_ids)
        limit = self._config.max_message_bytes
        for name, size in (("request", request.nbytes(rows)), ("answer", answer.nbytes(rows))):
            if size > limit:
                raise service.Refused(
                    f"{name} of {rows} environments has {size} bytes; "
                    f"this client's max_message_bytes is {limit}"
                )
        with self._lock:
            if self._closed:
                raise service.Unavailable(f"{self._address}: this client is closed")
            if self._channel is None:
                self._channel = self._connect()
            stream = streams.open_stream(self._channel, options.METHOD, self._config.direct)
            exchange = _TimedExchange(stream, self._deadlines, self._address)
            session = RemoteSession(exchange, request, answer, rows, self._config, self._forget)
            self._sessions.add(session)
        try:
            session.shake_hands(first, timeout)
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        """Ends all sessions and joins all threads. May be called twice, and from any thread."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
            channel, self._channel = self._channel, None
        for session in sessions:
            session.close()
        if channel is not None:
            channel.close()
        self._deadlines.close()

    def _forget(self, session: "RemoteSession") -> None:
        with self._lock:
            self._sessions.discard(session)

    def _connect(self) -> grpc.Channel:
        config = self._config
        channel_options = [
            *options.common_options(
                config.max_message_bytes, config.keepalive_time, config.keepalive_timeout
            ),
            # A server that comes back is found soon; its own actors are few enough for that.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # An HTTP proxy of the environment is for the web, not for a node of the same run.
            ("grpc.enable_http_proxy", 0),
        ]
        if config.credentials is None:
            return grpc.insecure_channel(self._address, channel_options)
        return grpc.secure_channel(self._address, config.credentials, channel_options)


class RemoteSession:
    """A session at a server. One thread steps; `close` may come from another and wakes it."""

    def __init__(
        self,
        exchange: "_TimedExchange",
        request: wire.Layout,
        answer: wire.Layout,
        rows: int,
        config: ClientConfig,
        on_close: Any,
    ):
        """Takes over the stream. Made by `RemotePolicyService.open`.

        Args:
          exchange: the stream with its deadline.
          request: layout of the time steps.
          answer: layout of the actions.
          rows: environments.
          config: of the client.
          on_close: called once with the session when it has ended.
        """
        self._exchange = exchange
        self._request = request
        self._answer = answer
        self._rows = rows
        self._config = config
        self._on_close = on_close
        # Held while the stream is in use: by whoever sends or waits, or else by `close`.
        self._in_use = threading.Lock()
        self._unanswered = False
        self._closed = False

    def shake_hands(self, first: bytes, timeout: float) -> None:
        """Sends the hello and checks the answer.

        Raises:
          service.Refused: where the server or this client disagrees about anything.
          service.Unavailable: where the server does not answer within `timeout` seconds.
        """
        with self._in_use:
            self._exchange.send(first)
            reply = self._exchange.receive(timeout, opening=True)
            try:
                messages.check_answer(reply, self._request, self._answer, self._rows)
            except wire.WireError as error:
                raise service.Refused(str(error)) from error

    def step(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> types.Nested:
        """Answers one time step of each environment. See `service.Session.step`.

        The arrays of `time_steps` are copied once, straight into the message. Any error ends the
        session.
        """
        with self._use():
            self._send(time_steps)
            return self._receive(timeout)

    def send(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> None:
        """Sends time steps on their way. See `service.Session.send`; nothing is waited for."""
        del timeout
        with self._use():
            self._send(time_steps)

    def receive(self, timeout: float | None = None) -> types.Nested:
        """Waits for the actions. See `service.Session.receive`."""
        with self._use():
            return self._receive(timeout)

    def _send(self, time_steps: dm_env.TimeStep) -> None:
        if self._unanswered:
            raise service.Unavailable("the session waits for an answer already")
        message = self._request.pack(time_steps)
        if len(message) != self._request.nbytes(self._rows):
            rows = len(time_steps.step_type)
            raise wire.WireError(f"expected rows of {self._rows} environments, got {rows}")
        self._exchange.send(message)
        self._unanswered = True

    def _receive(self, timeout: float | None) -> types.Nested:
        if not self._unanswered:
            raise service.Unavailable("the session waits for no answer")
        reply = self._exchange.receive(self._config.step_timeout if timeout is None else timeout)
        self._unanswered = False
        return self._answer.unpack(reply, self._rows)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keeps the stream to this thread; any error ends the session."""
        if not self._in_use.acquire(blocking=False):
            raise service.Unavailable("the session is in use by another thread")
        ok = False
        try:
            if self._closed:
                raise service.Unavailable("the session is closed")
            yield
            ok = True
        except wire.WireError as error:
            raise service.Refused(str(error)) from error
        finally:
            self._in_use.release()
            # A `close` that found the stream in use has left the rest to this thread.
            if self._closed or not ok:
                self.close()

    def close(self) -> None:
        """Ends the session. See `service.Session.close`.

        Returns when the server has freed the rows, or after `close_timeout`. While another thread
        waits for an answer, that one is woken with `service.Unavailable` and does the waiting.
        """
        self._closed = True
        if not self._in_use.acquire(blocking=False):
            self._exchange.cancel()
            return
        try:
            self._exchange.finish(self._config.close_timeout)
        finally:
            self._in_use.release()
        self._on_close(self)


class _TimedExchange:
    """A stream on which waiting ends by a deadline, and whose end is an error of `service`."""

    def __init__(self, stream: streams.Stream, watch: deadlines.Deadlines, address: str):
        self._stream = stream
        self._address = address
        self._late = False
        self._finished = False
        self._deadline = watch.add(self._expire)

    def send(self, message: bytes) -> None:
        self._stream.send(message)

    def receive(self, timeout: float, opening: bool = False) -> bytes:
        self._deadline.set(timeout)
        try:
            return self._stream.receive()
        except streams.StreamEnded as ended:
            raise self._translate(ended, timeout, opening) from None
        finally:
            self._deadline.clear()

    def cancel(self) -> None:
        self._stream.cancel()

    def finish(self, timeout: float) -> None:
        """Ends the stream, at the latest after `timeout` seconds."""
        if self._finished:
            return
        self._finished = True
        self._deadline.set(timeout)
        try:
            self._stream.finish()
        finally:
            self._deadline.remove()

    def _expire(self) -> None:
        self._late = True
        self._stream.cancel()

    def _translate(
        self, ended: streams.StreamEnded, timeout: float, opening: bool
    ) -> service.PolicyServiceError:
        code, text = ended.code, f"{self._address}: {ended.details}"
        if self._late:
            return service.Unavailable(f"{self._address} did not answer within {timeout:g} s")
        if code is grpc.StatusCode.ABORTED:
            return service.Fenced(text)
        # When a session opens, streams have run out and may come free; later, a message was too
        # large and would be so again.
        exhausted = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if code in _REFUSALS or (exhausted and not opening):
            return service.Refused(text)
        return service.Unavailable(f"{text} ({code.name})")
