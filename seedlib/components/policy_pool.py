"""Several policy services that stand for one: an actor moves on when its own goes away."""

import dataclasses
import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import dm_env
from absl import logging

from seedlib import types
from seedlib.components.transport import service

# Seconds that an actor's environments wait while it looks whether its own service is back.
_GLANCE = 0.5


class PolicyPool:
    """A `PolicyService` that opens each session at one of several services.

    When a session's service goes away, the actor opens another session as it does with a single
    service, and gets one at the next service that answers. A session away from the pool's first
    service looks for that one from time to time, and moves there once it answers: so a service that
    comes later, or comes back, gets the actors that are meant for it.
    """

    def __init__(
        self,
        services: Sequence[service.PolicyService],
        first: int = 0,
        attempt: float = 2.0,
        patience: float = 0.0,
        return_period: float = 15.0,
    ) -> None:
        """Names the services.

        Args:
          services: at least one.
          first: which one to try first; different for different actors, to spread them.
          attempt: seconds to try one service before the next.
          patience: seconds from now in which only the first one is tried: where all start together,
            those that are ready sooner shall not get every actor.
          return_period: seconds between two looks for the first one by a session that is elsewhere.

        Raises:
          ValueError: there is no service.
        """
        if not services:
            raise ValueError("a pool needs at least one policy service")
        self._services = tuple(services)
        self._home = self._next = first % len(self._services)
        self._return_period = return_period
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
                logging.warning("%s: moved to policy service %d", hello.actor_id, index)
            with self._lock:
                self._next = index
                self._spread_until = 0.0
            if index == self._home:
                return session
            return _Guest(session, functools.partial(self._go_home, hello), self._return_period)
        raise service.Unavailable("; ".join(reasons))

    def _go_home(self, hello: service.Hello) -> service.Session | None:
        """Returns a session at the first service; None where it is still away, or has no room."""
        again = dataclasses.replace(hello, incarnation=secrets.token_hex(8))
        try:
            session = self._services[self._home].open(again, min(_GLANCE, self._attempt))
        except (service.Unavailable, service.Refused) as error:
            logging.info("%s: stays where it is: %s", hello.actor_id, error)
            return None
        logging.warning("%s: is back at policy service %d", hello.actor_id, self._home)
        with self._lock:
            self._next = self._home
        return session


class _Guest:
    """A session at another service than the actor's own, until that one answers."""

    def __init__(
        self,
        session: service.Session,
        go_home: Callable[[], service.Session | None],
        period: float,
    ) -> None:
        self._session = session
        self._go_home = go_home
        self._period = period
        self._next_look = time.monotonic() + period
        self._lock = threading.Lock()
        self._closed = False

    def step(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> types.Nested:
        """See `service.Session.step`."""
        self.send(time_steps, timeout)
        return self.receive(timeout)

    def send(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> None:
        """See `service.Session.send`. Here, where no answer is under way, the session moves."""
        if time.monotonic() >= self._next_look:
            self._look()
        self._session.send(time_steps, timeout)

    def receive(self, timeout: float | None = None) -> types.Nested:
        """See `service.Session.receive`."""
        return self._session.receive(timeout)

    def _look(self) -> None:
        home = self._go_home()
        self._next_look = time.monotonic() + self._period
        if home is None:
            return
        with self._lock:
            if self._closed:
                home.close()
                raise service.Unavailable("the session is closed")
            abroad, self._session = self._session, home
        self._next_look = float("inf")
        abroad.close()

    def close(self) -> None:
        """See `service.Session.close`."""
        with self._lock:
            self._closed = True
            session = self._session
        session.close()
