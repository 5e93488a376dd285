"""Several policy services that stand for one: an actor moves on when its own goes away."""

import threading
import time
from collections.abc import Sequence

from absl import logging

from seedlib.components.transport import service


class PolicyPool:
    """A `PolicyService` that opens each session at one of several services.

    A session belongs to the service that opened it. When that goes away, the actor opens another
    session as it does with a single service, and gets one at the next service that answers.
    """

    def __init__(
        self,
        services: Sequence[service.PolicyService],
        first: int = 0,
        attempt: float = 2.0,
        patience: float = 0.0,
    ) -> None:
        """Names the services.

        Args:
          services: at least one.
          first: which one to try first; different for different actors, to spread them.
          attempt: seconds to try one service before the next.
          patience: seconds from now in which only the first one is tried: where all start together,
            those that are ready sooner shall not get every actor.

        Raises:
          ValueError: there is no service.
        """
        if not services:
            raise ValueError("a pool needs at least one policy service")
        self._services = tuple(services)
        self._next = first % len(self._services)
        self._attempt = attempt
        self._spread_until = time.monotonic() + patience
        self._lock = threading.Lock()

    def open(self, hello: service.Hello, timeout: float | None = None) -> service.Session:
        """Opens a session at the first service that answers, beginning with the last good one.

        Raises:
          service.Refused: the service that answered does not want these environments.
          service.Unavailable: none of them answered.
        """
        attempt = self._attempt if timeout is None else min(timeout, self._attempt)
        reasons = []
        with self._lock:
            start = self._next
        spreading = time.monotonic() < self._spread_until
        for offset in range(1 if spreading else len(self._services)):
            index = (start + offset) % len(self._services)
            try:
                session = self._services[index].open(hello, attempt)
            except service.Unavailable as error:
                reasons.append(str(error))
                continue
            if offset:
                logging.info("%s: moved to policy service %d", hello.actor_id, index)
            with self._lock:
                self._next = index
                self._spread_until = 0.0
            return session
        raise service.Unavailable("; ".join(reasons))
