"""Keeps inference in another process supplied with a learner's parameters, and reports to it."""

import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from absl import logging

from seedlib.components.transport import backoff, learner_service, options, service


@dataclasses.dataclass(frozen=True)
class LearnerClientConfig:
    """How a client talks to the learner.

    Attributes:
      period: seconds between exchanges; new parameters are at most this much older than at the
        learner.
      connect_timeout: seconds that the learner may be out of reach before the client gives up.
      call_timeout: seconds that one exchange may take.
      max_message_bytes: largest message, either way; parameters must fit.
      run_token: the run's secret; "" where there is none.
    """

    period: float = 0.1
    connect_timeout: float = 300.0
    call_timeout: float = 60.0
    max_message_bytes: int = (1 << 31) - 1
    run_token: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        for field in ("period", "connect_timeout", "call_timeout"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")


class LearnerClient:
    """Exchanges with a learner in a thread of its own, from `start` to `close`.

    What happened while the learner was away is reported when it is back. The last report before
    `close` is sent too.
    """

    def __init__(
        self,
        address: str,
        leaves: Sequence[Any],
        config: LearnerClientConfig | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
          address: of a `LearnerServer`.
          leaves: what the parameters look like, anything with `shape` and `dtype`, in order.
          config: settings.
        """
        options.check_address(address)
        self._address = address
        self._config = config or LearnerClientConfig()
        self._layout = learner_service.layout_of(leaves)
        self._signature = learner_service.signature_of(self._layout)
        self._source = secrets.token_hex(8)
        self._condition = threading.Condition()
        self._newest: tuple[int, list[np.ndarray]] | None = None
        self._error: service.PolicyServiceError | None = None
        self._agent_steps = 0
        self._episodes: dict[str, list[float]] = collections.defaultdict(list)
        self._statistics: Callable[[], Mapping[str, float]] = dict
        self._go_on = True
        self._network_bytes = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._call: Any = None

    def start(self) -> None:
        """Starts to exchange."""
        self._thread = threading.Thread(target=self._run, name="learner-client", daemon=True)
        self._thread.start()

    @property
    def go_on(self) -> bool:
        """What the learner said last: whether the run goes on."""
        return self._go_on

    @property
    def network_bytes(self) -> int:
        """Bytes of parameters that came; reports, and what gRPC adds, are left out."""
        return self._network_bytes

    def newest(self, timeout: float | None = None) -> tuple[int, list[np.ndarray]]:
        """Returns the newest version that has come, and its leaves (read-only).

        Args:
          timeout: seconds to wait for the first one; None waits until the client gives up.

        Raises:
          TimeoutError: none came within `timeout`.
          service.Refused: the learner has other parameters, or another token.
          service.Unavailable: the learner stayed out of reach, or the client is closed.
        """
        with self._condition:
            known = self._condition.wait_for(
                lambda: self._newest is not None or self._error is not None, timeout
            )
            if self._error is not None:
                raise self._error
            if not known or self._newest is None:
                raise TimeoutError(f"{self._address}: no parameters within {timeout} s")
            return self._newest

    def count(self, agent_steps: int, episodes: Mapping[str, Sequence[float]] | None) -> None:
        """Adds to the next report.

        Args:
          agent_steps: transitions of training environments.
          episodes: columns of ended episodes, each a sequence; None for none.

        Raises:
          service.PolicyServiceError: the client has given up.
        """
        with self._condition:
            if self._error is not None and not self._closing.is_set():
                raise self._error
            self._agent_steps += agent_steps
            for name, values in (episodes or {}).items():
                self._episodes[name].extend(values)

    def watch(self, statistics: Callable[[], Mapping[str, float]]) -> None:
        """Sends `statistics()` along with each report."""
        self._statistics = statistics

    def close(self) -> None:
        """Sends the last report if the learner is there, and joins the thread."""
        self._closing.set()
        call = self._call
        if call is not None:
            call.cancel()  # It is repeated as the last one, which waits less long.
        if self._thread is not None:
            self._thread.join(self._config.call_timeout + 5.0)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._address}: the learner client did not end")

    def _run(self) -> None:
        """Exchanges until closed; ends with an error after `connect_timeout` without success."""
        limit = self._config.max_message_bytes
        channel = grpc.insecure_channel(
            self._address,
            [
                *options.common_options(limit, 20.0, 10.0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        call = channel.unary_unary(learner_service.METHOD)
        delays = backoff.Backoff(initial=0.1, maximum=2.0)
        reached = time.monotonic()
        sequence = 0
        report: learner_service.Report | None = None
        final = False
        try:
            while True:
                closing = self._closing.is_set()
                if report is None:
                    # Only a report that was begun after `close` holds all that there is to say.
                    final = closing
                    report, sequence = self._take_report(sequence), sequence + 1
                try:
                    if not self._exchange(call, report, closing):
                        continue
                    report, reached = None, time.monotonic()
                    delays.reset()
                except grpc.RpcError as error:
                    self._consider(error, reached)
                    if not closing:
                        self._closing.wait(next(delays))
                        continue
                    logging.warning("%s: the last report was not taken", self._address)
                    final = True
                if final:
                    self._fail(service.Unavailable(f"{self._address}: this client is closed"))
                    return
                self._closing.wait(self._config.period)
        except service.PolicyServiceError as error:
            self._fail(error)
        except Exception as error:
            logging.exception("%s: the learner client failed", self._address)
            self._fail(service.Unavailable(f"{type(error).__name__}: {error}"))
        finally:
            channel.close()

    def _take_report(self, sequence: int) -> learner_service.Report:
        with self._condition:
            steps, self._agent_steps = self._agent_steps, 0
            episodes = dict(self._episodes)
            self._episodes.clear()
        return learner_service.Report(
            self._source, sequence, steps, episodes, dict(self._statistics())
        )

    def _exchange(self, call: Any, report: learner_service.Report, closing: bool) -> bool:
        """Performs one exchange; returns False where `close` cancelled it."""
        known = -1 if self._newest is None else self._newest[0]
        request = learner_service.Request(self._config.run_token, known, self._signature, report)
        timeout = 2.0 if closing else self._config.call_timeout
        self._call = call.future(learner_service.encode_request(request), timeout=timeout)
        try:
            answer = self._call.result()
        except grpc.FutureCancelledError:
            return False
        finally:
            self._call = None
        version, self._go_on, packed = learner_service.decode_answer(answer)
        if version < 0:
            return True
        self._network_bytes += len(packed)
        leaves = [leaf[0] for leaf in self._layout.unpack(packed, 1)]
        with self._condition:
            self._newest = version, leaves
            self._condition.notify_all()
        return True

    def _consider(self, error: grpc.RpcError, reached: float) -> None:
        """Raises where trying again is useless, or was tried long enough."""
        code, details = error.code(), error.details()
        if code in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ):
            raise service.Refused(f"learner at {self._address}: {details}")
        away = time.monotonic() - reached
        if away > self._config.connect_timeout:
            raise service.Unavailable(
                f"learner at {self._address}: out of reach for {away:.0f} s ({details})"
            )

    def _fail(self, error: service.PolicyServiceError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()
