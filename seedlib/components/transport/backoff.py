"""How long to wait before the next attempt: delays that double, with jitter."""

import random


class Backoff:
    """An endless iterator of delays in seconds.

    The n-th delay (from 0) is `min(maximum, initial * 2**n)`, shortened by a random part of at most
    `jitter`, so that actors which lost the same server do not come back in the same instant.
    """

    def __init__(
        self,
        initial: float = 0.1,
        maximum: float = 10.0,
        jitter: float = 0.5,
        seed: int | None = None,
    ):
        """Starts with the shortest delay.

        Args:
          initial: the first delay in seconds, before jitter.
          maximum: no delay is longer, in seconds.
          jitter: the largest part that is taken off a delay, in 0..1.
          seed: of the jitter; None takes one from the operating system.

        Raises:
          ValueError: where a value is out of range, naming it.
        """
        if not initial > 0:
            raise ValueError(f"backoff initial must be above 0 seconds, got {initial}")
        if not initial <= maximum < float("inf"):
            raise ValueError(f"backoff maximum must be at least initial ({initial}), got {maximum}")
        if not 0 <= jitter <= 1:
            raise ValueError(f"backoff jitter must be in 0..1, got {jitter}")
        self._initial = initial
        self._maximum = maximum
        self._jitter = jitter
        self._random = random.Random(seed)
        self._next = initial

    def __iter__(self) -> "Backoff":
        """Returns itself."""
        return self

    def __next__(self) -> float:
        """Returns the next delay in seconds."""
        delay = self._next
        self._next = min(self._maximum, 2 * delay)
        return delay * (1 - self._jitter * self._random.random())

    def reset(self) -> None:
        """Starts over with the shortest delay, after an attempt that worked."""
        self._next = self._initial
