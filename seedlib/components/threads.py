"""Threads with an owner: named, joined, and never silent about an exception."""

import threading
import traceback
from collections.abc import Callable

from absl import logging


class ThreadGroup:
    """Some threads that live and end together.

    The first exception of any of them is kept, logged with its traceback, and raised in the owner
    by `check`, `wait` or `join`.
    """

    def __init__(self, name: str) -> None:
        """Starts with no thread."""
        self._name = name
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._on_error: list[Callable[[], None]] = []

    def on_error(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, in the failing thread, after the group's first exception."""
        self._on_error.append(callback)

    def start(self, function: Callable[[], None], name: str) -> None:
        """Runs `function` in a thread called `group/name`."""

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=f"{self._name}/{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Records an exception as if a thread of the group had raised it."""
        with self._lock:
            first = self._error is None
            if first:
                self._error = error
        trace = "".join(traceback.format_exception(error))
        logging.error("thread %s failed:\n%s", threading.current_thread().name, trace)
        self._ended.set()
        if first:
            for callback in self._on_error:
                callback()

    @property
    def error(self) -> BaseException | None:
        """The first exception, or None."""
        return self._error

    def check(self) -> None:
        """Raises the first exception of any thread, if there is one."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for an exception, or for `finish`; raises the former.

        Returns:
          Whether `finish` was called within `timeout` seconds.
        """
        ended = self._ended.wait(timeout)
        self.check()
        return ended

    def finish(self) -> None:
        """Wakes those who `wait`."""
        self._ended.set()

    def join(self, timeout: float) -> None:
        """Joins every thread.

        Args:
          timeout: seconds for each.

        Raises:
          TimeoutError: a thread is still alive; the message names it.
        """
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"thread {thread.name} did not end within {timeout} s")
        self._threads.clear()
