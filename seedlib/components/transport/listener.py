"""A gRPC server on one address: bound for sure, with limits, keepalive and a health service."""

import concurrent.futures
import dataclasses
import errno
import socket
from collections.abc import Sequence

import grpc
from absl import logging
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from seedlib.components.transport import messages, options, wire

# How long a stop waits, after its grace, for gRPC to end its calls.
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


class Listener:
    """Listens on one address. Starts once and stops once; its owner's handlers do the work."""

    def __init__(
        self,
        name: str,
        service_name: str,
        handlers: Sequence[grpc.GenericRpcHandler],
        threads: int,
        config: ServerConfig,
    ) -> None:
        """Listens to nothing yet.

        Args:
          name: for messages, for example "policy server".
          service_name: for the health service.
          handlers: of the calls.
          threads: calls at a time, those of the health service included; more are refused.
          config: settings.
        """
        self._name = name
        self._service_name = service_name
        self._handlers = tuple(handlers)
        self._threads = threads
        self._config = config
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None
        self._health: health.HealthServicer | None = None
        self._address = ""
        self._port = 0

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
        if self._server is not None:
            raise RuntimeError(f"a {self._name} starts only once")
        host, _, port = config.address.rpartition(":")
        # `localhost` could be bound as ::1 alone while another server has 127.0.0.1.
        address = f"127.0.0.1:{port}" if host == "localhost" else config.address
        _refuse_live_socket(address)
        executor = concurrent.futures.ThreadPoolExecutor(
            self._threads, self._name.replace(" ", "-")
        )
        server = grpc.server(
            executor,
            handlers=self._handlers,
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
            maximum_concurrent_rpcs=self._threads,
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
            logging.warning("%s listens on %s without TLS", self._name, address)
        else:
            logging.info("%s listens on %s", self._name, address)
        return address

    def set_serving(self, serving: bool) -> None:
        """Sets what the standard health service says. Not serving until told.

        Raises:
          RuntimeError: before `start`.
        """
        if self._health is None:
            raise RuntimeError(f"the {self._name} is not started")
        status = health_pb2.HealthCheckResponse
        for name in (health.OVERALL_HEALTH, self._service_name):
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def end_calls(self, grace: float) -> bool:
        """Ends every call; those under way have `grace` seconds to be answered.

        Returns:
          Whether it was started at all.
        """
        if self._server is None:
            return False
        self.set_serving(False)
        # Returns once every call has its status; their threads may still be in a handler.
        self._server.stop(grace).wait(grace + _STOP_MARGIN)
        return True

    def join(self, wait: bool = True) -> None:
        """Joins the handlers' threads, or lets them be where `wait` is False."""
        if self._executor is not None:
            self._executor.shutdown(wait=wait)
            logging.info("%s on %s has stopped", self._name, self._address)


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
