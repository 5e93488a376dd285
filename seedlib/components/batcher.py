"""Turns many small requests into few padded batches: threads in, batches out.

The batcher knows neither a policy, nor a device, nor a network. Producers call `submit` with the
rows of a request, which are copied once into a preallocated batch; one consumer calls `next_batch`
and answers with `Batch.complete`. Batching is continuous: whatever waits is taken at once, and the
next batch fills while the consumer is busy. `minimum_batch_size` and `timeout` trade latency for
larger batches, and never hold a lone request longer than `timeout`.
"""

import bisect
import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from seedlib import specs, types


class BatcherClosed(Exception):
    """The batcher was closed before the request was answered."""


class RequestTimeout(Exception):
    """No answer, or no room in a batch, within the time that the caller gave."""


class RequestCancelled(Exception):
    """The caller of `submit` stopped wanting an answer while it waited for room."""


@dataclasses.dataclass(frozen=True)
class BatcherConfig:
    """How requests become batches.

    Attributes:
      batch_sizes: the padded sizes, ascending; a batch is padded to the smallest that holds it.
        The last one is the largest batch.
      minimum_batch_size: rows that a batch waits for, at most `timeout` long.
      timeout: seconds from the first request of a batch after which it is taken however small.
      buffers: batches that may exist at once, filling and in flight. Where all are taken, `submit`
        waits, so memory stays bounded.
    """

    batch_sizes: tuple[int, ...]
    minimum_batch_size: int = 1
    timeout: float = 0.01
    buffers: int = 4

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the values.
        """
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"batch_sizes must be positive and ascending, got {sizes}")
        if not 1 <= self.minimum_batch_size <= sizes[-1]:
            raise ValueError(
                f"minimum_batch_size must be in 1..{sizes[-1]} (the largest of batch_sizes), "
                f"got {self.minimum_batch_size}"
            )
        if not self.timeout >= 0:  # Not a number is refused too.
            raise ValueError(f"timeout must not be negative, got {self.timeout}")
        if self.buffers < 2:
            raise ValueError(
                f"buffers must be at least 2 (one fills, one runs), got {self.buffers}"
            )


class Request:
    """A request on its way: waits for its answer.

    Attributes:
      tag: what `submit` was given; the consumer reads it.
      start: its first row in the batch.
      stop: one past its last row.
    """

    __slots__ = ("_answered", "_claimed", "_error", "_result", "start", "stop", "tag")

    def __init__(self, tag: Any, start: int, stop: int) -> None:
        """Made by `RequestBatcher.submit`."""
        self.tag = tag
        self.start = start
        self.stop = stop
        self._result: types.Nested = None
        self._error: BaseException | None = None
        # A bare lock is the cheapest thing to wait on: an Event costs three objects a request.
        self._answered = threading.Lock()
        self._answered.acquire()
        self._claimed = threading.Lock()

    def result(self, timeout: float | None = None) -> types.Nested:
        """Waits for the answer: the request's rows of what the consumer completed.

        Args:
          timeout: seconds; None waits until the batcher is closed.

        Raises:
          RequestTimeout: no answer within `timeout`.
          BatcherClosed: the batcher was closed first.
          BaseException: whatever the consumer failed the request with.
        """
        if not self._answered.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise RequestTimeout(f"no answer within {timeout:.3f} s")
        self._answered.release()  # A second call returns the same.
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self, error: BaseException) -> None:
        """Wakes who waits with `error`, unless there is an answer. The rows stay in the batch."""
        self._answer(None, error)

    def _answer(self, result: types.Nested, error: BaseException | None) -> None:
        # The batch, its failure, a cancellation and the batcher's end may all come at once, from
        # several threads; the first one counts.
        if not self._claimed.acquire(blocking=False):
            return
        self._result = result
        self._error = error
        self._answered.release()


class _Buffer:
    """Preallocated rows, and the views of them that batches hand out; made once, used often."""

    def __init__(self, row_spec: types.Nested, sizes: tuple[int, ...]) -> None:
        nested = specs.zeros(row_spec, (sizes[-1],))
        self.leaves = tree.flatten(nested)
        self.rows = {
            size: tree.map_structure(lambda leaf, size=size: leaf[:size], nested) for size in sizes
        }


class Batch:
    """Rows of several requests, padded to one of the configured sizes.

    Attributes:
      requests: the requests, in the order of their rows.
      size: rows that are real; those beyond hold old data and must not reach anything.
      padded_size: the size after padding.
      rows: nested arrays `[padded_size, ...]`, the consumer's to change until `release`.
      wait_seconds: how long the first request had waited when the batch was taken.
    """

    def __init__(self, batcher: "RequestBatcher", buffer: _Buffer) -> None:
        """Made by the batcher."""
        self._batcher = batcher
        self._buffer = buffer
        self._leaves = buffer.leaves
        self._copying = 0
        self._open = True
        self.requests: list[Request] = []
        self.size = 0
        self.padded_size = 0
        self.wait_seconds = 0.0
        self.first_submit = 0.0

    @property
    def rows(self) -> types.Nested:
        """Nested arrays `[padded_size, ...]`."""
        return self._buffer.rows[self.padded_size]

    def complete(self, outputs: types.Nested) -> None:
        """Answers every request with its rows of `outputs`, leaves `[>= size, ...]`.

        Raises:
          ValueError: a leaf has fewer rows; nobody is answered.
        """
        leaves = tree.flatten(outputs)
        for leaf in leaves:
            if not leaf.shape or leaf.shape[0] < self.size:
                raise ValueError(f"a batch of {self.size} rows got an answer of shape {leaf.shape}")
        for request in self._take_requests():
            start, stop = request.start, request.stop
            rows = tree.unflatten_as(outputs, [leaf[start:stop] for leaf in leaves])
            request._answer(rows, None)

    def fail(self, error: BaseException) -> None:
        """Answers every request with an error."""
        for request in self._take_requests():
            request._answer(None, error)

    def _take_requests(self) -> list[Request]:
        requests, self.requests = self.requests, []
        return requests

    def release(self) -> None:
        """Gives the rows back for the next batch; unanswered requests fail. May be called twice."""
        if self._open:
            self._open = False
            self.fail(BatcherClosed("the batch was released without an answer"))
            self._batcher._recycle(self._buffer)


@dataclasses.dataclass
class BatcherStatistics:
    """Counts since the start, 64 bit and more (Python integers).

    Attributes:
      batches: batches taken.
      rows: real rows in them.
      padded_rows: rows in them, padding included.
      wait_seconds: sum over batches of the time from first request to taking.
    """

    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    wait_seconds: float = 0.0


class RequestBatcher:
    """Collects requests into batches. `submit` may be called by any number of threads."""

    def __init__(self, row_spec: types.Nested, config: BatcherConfig) -> None:
        """Allocates the buffers.

        Args:
          row_spec: nested leaves with `shape` and `dtype`: one row.
          config: how requests become batches.
        """
        self._config = config
        self._capacity = config.batch_sizes[-1]
        self._leaf_specs = [
            ("/".join(map(str, path)), tuple(leaf.shape), np.dtype(leaf.dtype))
            for path, leaf in tree.flatten_with_path(row_spec)
        ]
        self._condition = threading.Condition(threading.Lock())
        self._free = collections.deque(
            _Buffer(row_spec, config.batch_sizes) for _ in range(config.buffers)
        )
        self._full: collections.deque[Batch] = collections.deque()
        self._filling: Batch | None = None
        self._taken: set[Batch] = set()
        self._closed = False
        self.statistics = BatcherStatistics()

    @property
    def config(self) -> BatcherConfig:
        """What the batcher was made with."""
        return self._config

    def submit(
        self,
        rows: types.Nested,
        tag: Any = None,
        timeout: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Request:
        """Copies rows into the batch that is filling; a request's rows are never split.

        Args:
          rows: nested arrays `[n, ...]` of the row spec's structure, 1 <= n <= largest batch size.
          tag: handed to the consumer with the request.
          timeout: seconds to wait for room; None waits until the batcher is closed.
          cancelled: asked while there is no room, and again after each `wake`.

        Returns:
          The request, to wait on.

        Raises:
          ValueError: more rows than the largest batch, or leaves of other shapes or dtypes than
            the spec's; the message names the path. Nothing was taken.
          RequestTimeout: no room within `timeout`.
          RequestCancelled: `cancelled` was true before there was room.
          BatcherClosed: the batcher is closed.
        """
        leaves = tree.flatten(rows)
        count = self._check(leaves)
        with self._condition:
            batch = self._reserve(count, timeout, cancelled)
            start = batch.size
            batch.size += count
            # The copy itself runs outside the lock; the consumer waits for it before it reads.
            batch._copying += 1
            request = Request(tag, start, start + count)
            batch.requests.append(request)
        try:
            for target, source in zip(batch._leaves, leaves, strict=True):
                target[start : start + count] = source
        finally:
            with self._condition:
                batch._copying -= 1
                self._condition.notify_all()
        return request

    def _check(self, leaves: list[np.ndarray]) -> int:
        """Returns the number of rows. What passes can be copied: no row is left half written."""
        if len(leaves) != len(self._leaf_specs):
            raise ValueError(f"expected {len(self._leaf_specs)} leaves, got {len(leaves)}")
        count = leaves[0].shape[0] if leaves[0].shape else 0
        if not 1 <= count <= self._capacity:
            raise ValueError(
                f"a request has {count} rows; the largest batch size is {self._capacity}"
            )
        for (path, shape, dtype), leaf in zip(self._leaf_specs, leaves, strict=True):
            if leaf.shape[1:] != shape or leaf.shape[:1] != (count,) or leaf.dtype != dtype:
                raise ValueError(
                    f"{path or 'rows'}: expected {dtype} {(count, *shape)}, "
                    f"got {leaf.dtype} {leaf.shape}"
                )
        return count

    def _reserve(self, count: int, timeout: float | None, cancelled: Callable[[], bool]) -> Batch:
        """Returns the filling batch with room for `count` rows. Holds the lock."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                raise BatcherClosed("the batcher is closed")
            batch = self._filling
            if batch is not None and batch.size + count <= self._capacity:
                return batch
            if self._free:
                if batch is not None:
                    self._full.append(batch)
                self._filling = Batch(self, self._free.popleft())
                self._filling.first_submit = time.monotonic()
                return self._filling
            if cancelled():
                raise RequestCancelled("cancelled while there was no room")
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise RequestTimeout(
                    f"no room in {self._config.buffers} batches within {timeout:.3f} s"
                )
            self._condition.wait(remaining)

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """Takes the next batch as soon as one is due.

        Args:
          timeout: seconds to wait; None waits until the batcher is closed.

        Returns:
          A batch, or None where none was due within `timeout`.

        Raises:
          BatcherClosed: the batcher is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                if self._closed:
                    raise BatcherClosed("the batcher is closed")
                now = time.monotonic()
                due_in = self._due_in(now)
                if due_in is not None and due_in <= 0:
                    break
                remaining = None if deadline is None else deadline - now
                if remaining is not None and remaining <= 0:
                    return None
                waits = [seconds for seconds in (due_in, remaining) if seconds is not None]
                self._condition.wait(min(waits) if waits else None)
            if self._full:
                batch = self._full.popleft()
            else:
                assert self._filling is not None
                batch, self._filling = self._filling, None
            self._taken.add(batch)  # So that `close` finds it while this waits.
            # Nobody joins a batch that is taken; those still copying finish in microseconds.
            while batch._copying:
                self._condition.wait()
            if self._closed:
                raise BatcherClosed("the batcher is closed")
            sizes = self._config.batch_sizes
            batch.padded_size = sizes[bisect.bisect_left(sizes, batch.size)]
            batch.wait_seconds = time.monotonic() - batch.first_submit
            statistics = self.statistics
            statistics.batches += 1
            statistics.rows += batch.size
            statistics.padded_rows += batch.padded_size
            statistics.wait_seconds += batch.wait_seconds
        return batch

    def _due_in(self, now: float) -> float | None:
        """Seconds until a batch is due; None where nothing waits. Holds the lock."""
        if self._full:
            return 0.0
        batch = self._filling
        if batch is None:
            return None
        if batch.size >= self._config.minimum_batch_size:
            return 0.0
        return batch.first_submit + self._config.timeout - now

    def _recycle(self, buffer: _Buffer) -> None:
        with self._condition:
            self._free.append(buffer)
            self._taken = {batch for batch in self._taken if batch._open}
            self._condition.notify_all()

    def wake(self) -> None:
        """Lets those who wait for room ask again whether they are cancelled."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """Fails every request that has no answer yet and all later ones. May be called twice."""
        with self._condition:
            self._closed = True
            batches = [*self._full, *self._taken]
            if self._filling is not None:
                batches.append(self._filling)
            self._full.clear()
            self._filling = None
            self._condition.notify_all()
        for batch in batches:
            batch.fail(BatcherClosed("the batcher is closed"))


def padded_sizes(rows_per_request: int, requests: int, largest: int = 256) -> tuple[int, ...]:
    """Returns a small set of batch sizes for `requests` peers of `rows_per_request` rows each.

    The sizes double from one request to all of them, since a device call's compiled program is
    needed for each and padding wastes at most half a batch.

    Args:
      rows_per_request: environments per actor.
      requests: actors.
      largest: an upper bound, where the total is larger.

    Raises:
      ValueError: where a count is below 1.
    """
    if rows_per_request < 1 or requests < 1:
        raise ValueError(
            f"rows_per_request and requests must be positive, got {rows_per_request}, {requests}"
        )
    total = max(rows_per_request, min(rows_per_request * requests, largest))
    sizes = [rows_per_request]
    while sizes[-1] < total:
        sizes.append(min(2 * sizes[-1], total))
    return tuple(sizes)
