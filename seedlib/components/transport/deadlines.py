"""One thread that calls functions when their time has come, for any number of deadlines."""

import math
import threading
import time
from collections.abc import Callable

from absl import logging


class Deadline:
    """A function that is called once the time runs out. Made by `Deadlines.add`."""

    def __init__(self, owner: "Deadlines", callback: Callable[[], object]):
        """Starts without a time."""
        self._owner = owner
        self.callback = callback
        self.at = math.inf

    def set(self, seconds: float) -> None:
        """Calls the function `seconds` from now, in place of any earlier time."""
        self._owner.schedule(self, time.monotonic() + seconds)

    def clear(self) -> None:
        """Takes the time back. The function may be running by now."""
        self.at = math.inf

    def remove(self) -> None:
        """Takes the time back for good."""
        self._owner.discard(self)


class Deadlines:
    """Owns the thread; `close` joins it. Functions run one after the other and must be short."""

    def __init__(self, name: str):
        """Makes no thread yet.

        Args:
          name: of the thread.
        """
        self._name = name
        self._changed = threading.Condition()
        self._deadlines: set[Deadline] = set()
        self._wakes_at = math.inf
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, callback: Callable[[], object]) -> Deadline:
        """Returns a deadline of `callback`, not yet set.

        Raises:
          RuntimeError: after `close`.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            deadline = Deadline(self, callback)
            self._deadlines.add(deadline)
            return deadline

    def close(self) -> None:
        """Calls what is due, then ends the thread. May be called twice, not from a callback."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def schedule(self, deadline: Deadline, at: float) -> None:
        """Sets the monotonic time of a deadline."""
        deadline.at = at
        # Most deadlines are taken back in time and the next lies later, so the thread sleeps on.
        if at < self._wakes_at:
            with self._changed:
                self._changed.notify()

    def discard(self, deadline: Deadline) -> None:
        """Forgets a deadline."""
        deadline.at = math.inf
        with self._changed:
            self._deadlines.discard(deadline)

    def _run(self) -> None:
        while True:
            with self._changed:
                # Announced before the deadlines are read: one that is set meanwhile either is
                # seen below or sees an early `_wakes_at` and notifies, which waits for the lock.
                self._wakes_at = math.inf
                now = time.monotonic()
                due = [deadline for deadline in self._deadlines if deadline.at <= now]
                if not due:
                    if self._closed:
                        return
                    self._wakes_at = min((d.at for d in self._deadlines), default=math.inf)
                    wait = self._wakes_at - now
                    self._changed.wait(None if math.isinf(wait) else wait)
                    continue
                for deadline in due:
                    deadline.at = math.inf
            for deadline in due:
                try:
                    deadline.callback()
                except Exception:
                    logging.exception("%s: a callback failed", self._name)
