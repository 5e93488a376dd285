"""A FIFO of unrolls in memory, for programs of one thread: deterministic, and never waits."""

import collections
from collections.abc import Iterator, Sequence

import numpy as np
import tree

from seedlib import types
from seedlib.components import actor as actor_lib
from seedlib.components.tables import Sample, SinkClosed


class QueueFull(Exception):
    """More unrolls were put in than the queue holds; the one thread forgot to train."""


class LocalQueue:
    """Both ends of a queue of unrolls: an `UnrollSink` and an `UnrollSource`.

    It stands for a `TrajectoryQueue` where nothing may run beside the one thread, so `insert` into
    a full queue is an error and the iterator ends where no whole batch is there yet; it goes on
    when asked again later.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        """Starts empty.

        Args:
          batch_size: unrolls in a batch.
          capacity: unrolls that it holds.

        Raises:
          ValueError: it could not hold a batch.
        """
        if capacity < batch_size:
            raise ValueError(f"capacity {capacity} is less than batch_size {batch_size}")
        self._batch_size = batch_size
        self._capacity = capacity
        self._unrolls: collections.deque[types.Unroll] = collections.deque()
        self._closed = False

    def __len__(self) -> int:
        """Returns how many unrolls wait."""
        return len(self._unrolls)

    def insert(self, unrolls: types.Unroll) -> None:
        """Stores unrolls, leaves `[k, L, ...]`.

        Raises:
          QueueFull: there is no room.
          SinkClosed: the queue is closed.
        """
        if self._closed:
            raise SinkClosed("the queue is closed")
        count = len(unrolls.inputs.reward)
        if len(self._unrolls) + count > self._capacity:
            raise QueueFull(
                f"{count} unrolls do not fit: {len(self._unrolls)} of {self._capacity} places are "
                "taken"
            )
        for row in range(count):
            self._unrolls.append(tree.map_structure(lambda leaf, row=row: leaf[row], unrolls))

    def __iter__(self) -> Iterator[Sample]:
        """Returns itself."""
        return self

    def __next__(self) -> Sample:
        """Returns the next batch, leaves `[batch_size, L, ...]`.

        Raises:
          StopIteration: no whole batch is there now.
        """
        if len(self._unrolls) < self._batch_size:
            raise StopIteration
        taken = [self._unrolls.popleft() for _ in range(self._batch_size)]
        return Sample(tree.map_structure(lambda *leaves: np.stack(leaves), *taken))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Refuses: a queue has none.

        Raises:
          TypeError: always.
        """
        raise TypeError("a queue has no priorities; use a replay")

    def writer(self) -> "LocalQueue":
        """Returns itself, as a `TrajectoryQueue` returns a writer."""
        return self

    def reader(self) -> "LocalQueue":
        """Returns itself, as a `TrajectoryQueue` returns a reader."""
        return self

    def close(self) -> None:
        """Refuses what comes later. May be called twice."""
        self._closed = True


class ActingQueue(LocalQueue):
    """A queue that fills itself: whoever asks it for a batch steps the actors until there is one.

    So a learner without prefetching and actors of an inline inference server share one thread, and
    two runs with one seed do the same.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        """Starts empty, with no actor. See `LocalQueue`."""
        super().__init__(batch_size, capacity)
        self._actors: Sequence[actor_lib.EnvironmentActor] = ()
        self._turn = 0

    def act_with(self, actors: Sequence[actor_lib.EnvironmentActor]) -> None:
        """Names those who fill the queue; each is stepped once in turn."""
        self._actors = tuple(actors)

    def __next__(self) -> Sample:
        """Acts until a whole batch is there, and returns it.

        Raises:
          StopIteration: the queue was closed.
        """
        while len(self) < self._batch_size and not self._closed:
            # No further than there is need for, so that a queue of one batch is enough.
            actor = self._actors[self._turn]
            self._turn = (self._turn + 1) % len(self._actors)
            actor.step()
        return super().__next__()

    def stop(self) -> None:
        """Ends the queue, as a `TrajectoryQueue` is ended."""
        self.close()
