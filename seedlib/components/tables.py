"""What both ends of a table of unrolls promise, be it a queue or a replay."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from seedlib import types


class SinkClosed(Exception):
    """The table was closed; nobody wants unrolls any more."""


class UnrollSink(Protocol):
    """Where inference puts whole unrolls."""

    def insert(self, unrolls: types.Unroll) -> None:
        """Stores unrolls, leaves `[k, L, ...]`; blocks while there is no room.

        Raises:
          SinkClosed: `close` was called.
        """
        ...

    def close(self) -> None:
        """Ends the sink and wakes a blocked `insert`. May be called twice, by any thread."""
        ...


class Sample(NamedTuple):
    """A batch as a table gives it. Host arrays.

    Attributes:
      unrolls: leaves `[B, L, ...]`.
      weight: float32 `[B]`, importance weights; None for ones.
      keys: uint64 `[B]`, names of the sequences in a prioritised table; None in a queue.
    """

    unrolls: types.Unroll
    weight: np.ndarray | None = None
    keys: np.ndarray | None = None


class UnrollSource(Protocol):
    """Where the learner gets its batches."""

    def __iter__(self) -> Iterator[Sample]:
        """Returns itself."""
        ...

    def __next__(self) -> Sample:
        """Waits for the next batch.

        Raises:
          StopIteration: the source is closed.
        """
        ...

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Gives sequences new priorities, both `[B]`; returns before it is done."""
        ...

    def close(self) -> None:
        """Ends the source and wakes a blocked `__next__`. May be called twice, by any thread."""
        ...
