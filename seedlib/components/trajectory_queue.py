"""A Reverb FIFO table of unrolls: each is used once, in order, with bounded memory.

An item of the table is a *block* of unrolls, written whole as one Reverb step. Writing unrolls
step by step is about five times dearer, and a block of small unrolls costs little more than one
(see `docs/design.md` for the figures). A full table blocks its writers, which is the back-pressure
of the whole program: inference waits for the learner.
"""

import dataclasses
import math
import operator
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
import tree
from absl import logging

from seedlib import types
from seedlib.components import configs, threads
from seedlib.components.tables import Sample, SinkClosed

UNREACHABLE_SECONDS = 30.0
"""A server that does not answer for so long is given up. Reverb reconnects for about 22 seconds to
one that was started anew."""

_TABLE = "trajectory_queue"
_BLOCK_BYTES = 1 << 20
_PROBE_TIMEOUT = 1  # Whole seconds: Reverb takes no others.


@dataclasses.dataclass(frozen=True)
class QueueLayout:
    """What both ends of a queue must agree on.

    Attributes:
      unroll_spec: specs of one unroll, `[L, ...]`.
      batch_size: unrolls in a learner's batch.
      unrolls_per_item: unrolls in a block.
      items: blocks that the table holds.
    """

    unroll_spec: types.Unroll
    batch_size: int
    unrolls_per_item: int
    items: int

    @property
    def unroll_bytes(self) -> int:
        """Bytes of one unroll, uncompressed."""
        return sum(
            math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            for leaf in tree.flatten(self.unroll_spec)
        )


def layout(
    unroll_spec: types.Unroll, batch_size: int, config: configs.TrajectoryQueueConfig
) -> QueueLayout:
    """Returns the layout of a queue.

    Args:
      unroll_spec: specs of one unroll, `[L, ...]`.
      batch_size: unrolls in a learner's batch.
      config: how large the queue is.

    Raises:
      ValueError: where a block does not divide the batch, or the table cannot hold a batch.
    """
    bare = QueueLayout(unroll_spec, batch_size, 1, 1)
    block = config.unrolls_per_item
    if block is None:
        most = max(1, _BLOCK_BYTES // max(bare.unroll_bytes, 1))
        block = max(k for k in range(1, batch_size + 1) if batch_size % k == 0 and k <= most)
    if batch_size % block:
        raise ValueError(f"unrolls_per_item {block} does not divide batch_size {batch_size}")
    capacity = config.capacity
    if capacity is None:
        capacity = 2 * batch_size + config.environments
    if capacity < batch_size:
        raise ValueError(f"capacity {capacity} is less than batch_size {batch_size}")
    return QueueLayout(unroll_spec, batch_size, block, max(1, capacity // block))


class TrajectoryQueue:
    """Serves the table. Holds no thread of its own; Reverb's server does."""

    def __init__(
        self,
        queue_layout: QueueLayout,
        config: configs.TrajectoryQueueConfig,
        port: int | None = None,
    ) -> None:
        """Starts the server.

        Args:
          queue_layout: from `layout`.
          config: how large it is.
          port: where it listens; None picks a free one.
        """
        self.layout = queue_layout
        self._config = config
        signature = {
            name: tf.TensorSpec(
                (None, queue_layout.unrolls_per_item, *leaf.shape), np.dtype(leaf.dtype)
            )
            for name, leaf in _columns(queue_layout.unroll_spec).items()
        }
        self._table = reverb.Table.queue(_TABLE, queue_layout.items, signature=signature)
        server = reverb.Server([self._table], port=port)
        self._server: reverb.Server | None = server
        self._client = TrajectoryQueueClient(
            f"localhost:{server.port}", queue_layout, config, same_process=True
        )
        logging.info(
            "trajectory queue: at most %d unrolls of %d bytes (%.1f MB)",
            queue_layout.items * queue_layout.unrolls_per_item,
            queue_layout.unroll_bytes,
            queue_layout.items * queue_layout.unrolls_per_item * queue_layout.unroll_bytes / 1e6,
        )

    @property
    def address(self) -> str:
        """Where writers and readers connect."""
        return self._client.address

    def writer(self) -> "UnrollWriter":
        """Returns a writer."""
        return self._client.writer()

    def reader(self) -> "UnrollReader":
        """Returns a reader; in this process it bypasses the network."""
        return self._client.reader()

    def unrolls(self) -> int:
        """Returns how many unrolls the table holds now."""
        return int(self._table.info.current_size) * self.layout.unrolls_per_item

    def stop(self) -> None:
        """Closes this process's writers and readers, then the server. May be called twice.

        With a writer of another process still connected this takes five seconds.
        """
        # In this order, since a server waits for its writers, and a reader for its server.
        self._client.begin_close()
        # Let go of it here: at the interpreter's end Reverb's destructor finds its module gone.
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self._client.close()


class TrajectoryQueueClient:
    """Makes writers and readers of a queue, and closes them. Any thread may use it."""

    def __init__(
        self,
        address: str,
        queue_layout: QueueLayout,
        config: configs.TrajectoryQueueConfig,
        same_process: bool = False,
    ) -> None:
        """Connects to nothing yet.

        Args:
          address: of the queue's server.
          queue_layout: the same as the queue's.
          config: the same as the queue's.
          same_process: whether the queue's server is in this process.
        """
        self.address = address
        self._same_process = same_process
        self._layout = queue_layout
        self._config = config
        self._ends: list[UnrollWriter | UnrollReader] = []

    def writer(self) -> "UnrollWriter":
        """Returns a new writer."""
        writer = UnrollWriter(self.address, self._layout, self._config, self._same_process)
        self._ends.append(writer)
        return writer

    def reader(self) -> "UnrollReader":
        """Returns a new reader."""
        reader = UnrollReader(self.address, self._layout, self._config)
        self._ends.append(reader)
        return reader

    def begin_close(self) -> None:
        """Closes every writer that was made; readers end as soon as the server does."""
        for end in self._ends:
            if isinstance(end, UnrollWriter):
                end.close()
            else:
                end.begin_close()

    def close(self) -> None:
        """Closes every writer and reader that was made."""
        for end in self._ends:
            end.close()


def _columns(unroll: types.Unroll) -> dict[str, Any]:
    """Returns an unroll's leaves as Reverb's columns; the numbers keep the order of leaves."""
    return {
        "/".join([f"{number:03d}", *map(str, path)]): leaf
        for number, (path, leaf) in enumerate(tree.flatten_with_path(unroll))
    }


class _Wait:
    """One wait for a queue: says so in the log, and does not go on for a server that is gone."""

    def __init__(self, address: str, client: reverb.Client, warn_seconds: float, text: str) -> None:
        """Begins to wait.

        Args:
          address: of the server.
          client: of the server.
          warn_seconds: how often to log.
          text: what to log, with `%.0f` for the seconds.
        """
        self._address = address
        self._client = client
        self._warn = warn_seconds
        self._text = text
        self.started = self._warned = self._answered = self._probed = time.monotonic()

    def check(self) -> None:
        """Logs and looks after the server, where it is time to.

        Raises:
          ConnectionError: it has not answered for `UNREACHABLE_SECONDS`.
        """
        now = time.monotonic()
        if now - self._warned > self._warn:
            self._warned = now
            logging.warning(self._text, now - self.started)
        if now - self._probed < UNREACHABLE_SECONDS / 10:
            return
        try:
            self._client.server_info(_PROBE_TIMEOUT)
            self._answered = time.monotonic()
        except reverb.errors.DeadlineExceededError:
            if now - self._answered > UNREACHABLE_SECONDS:
                raise ConnectionError(
                    f"the trajectory queue at {self._address} has not answered for "
                    f"{now - self._answered:.0f} s"
                ) from None
        self._probed = time.monotonic()


class UnrollWriter:
    """Writes unrolls, in the order they come, in blocks. Any thread may use it.

    `network_bytes` counts the bytes of unrolls given to Reverb for another process. Reverb
    compresses them before it sends them, so that fewer may cross the network.
    """

    def __init__(
        self,
        address: str,
        queue_layout: QueueLayout,
        config: configs.TrajectoryQueueConfig,
        same_process: bool = False,
    ) -> None:
        """Connects to nothing yet; the first `insert` does, since the server may start later.

        Args:
          address: of the queue's server.
          queue_layout: the same as the queue's.
          config: the same as the queue's.
          same_process: whether the server is in this process, so that nothing leaves it.
        """
        block_bytes = queue_layout.unroll_bytes * queue_layout.unrolls_per_item
        self._network_bytes_of_block = 0 if same_process else block_bytes
        self.network_bytes = 0
        self._layout = queue_layout
        self._address = address
        self._warn = config.warn_seconds
        self._client = reverb.Client(address)
        self._writer: reverb.TrajectoryWriter | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pending: list[types.Unroll] = []
        self._count = 0
        self.wait_seconds = 0.0

    def insert(self, unrolls: types.Unroll) -> None:
        """Stores unrolls; blocks while the table is full. Keeps at most a block back.

        Args:
          unrolls: leaves `[k, L, ...]`, not changed later.

        Raises:
          SinkClosed: `close` was called, before or meanwhile.
          ConnectionError: the table is full, or unreachable, and its server does not answer.
        """
        with self._lock:
            if self._closed.is_set():
                raise SinkClosed("the writer is closed")
            self._insert(unrolls)

    def _insert(self, unrolls: types.Unroll) -> None:
        block = self._layout.unrolls_per_item
        self._pending.append(unrolls)
        self._count += len(unrolls.inputs.reward)
        if self._count < block:
            return
        together = (
            unrolls
            if len(self._pending) == 1
            else tree.map_structure(lambda *leaves: np.concatenate(leaves), *self._pending)
        )
        whole = self._count // block * block
        for start in range(0, whole, block):
            rows = slice(start, start + block)
            self._write(_columns(tree.map_structure(operator.itemgetter(rows), together)))
        self._count -= whole
        self._pending = (
            [tree.map_structure(lambda leaf: leaf[whole:], together)] if self._count else []
        )

    def _connect(self) -> reverb.TrajectoryWriter:
        wait = _Wait(
            self._address,
            self._client,
            self._warn,
            f"trajectory queue: a writer has waited %.0f s for the server at {self._address}",
        )
        while True:
            try:
                return self._client.trajectory_writer(1, get_signature_timeout_ms=500)
            except RuntimeError as error:
                if "Deadline Exceeded" not in str(error):
                    raise
                if self._closed.is_set():
                    raise SinkClosed("the writer was closed before it was connected") from None
                wait.check()

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        if self._writer is None:
            self._writer = self._connect()
        writer = self._writer
        writer.append(columns)
        writer.create_item(_TABLE, 1.0, {name: writer.history[name][-1:] for name in columns})
        self.network_bytes += self._network_bytes_of_block
        wait = _Wait(
            self._address,
            self._client,
            self._warn,
            f"trajectory queue: a writer has waited %.0f s for room ({self._layout.items} blocks "
            f"of {self._layout.unrolls_per_item} unrolls); the learner does not take any",
        )
        while True:
            try:
                # Neither `append` nor `create_item` ever blocks; waiting for all but one item here
                # is what bounds memory. After a timeout the item is still pending: wait again.
                writer.flush(block_until_num_items=1, timeout_ms=200)
                break
            except reverb.errors.DeadlineExceededError:
                if self._closed.is_set():
                    raise SinkClosed("the writer was closed while the table was full") from None
                wait.check()
        self.wait_seconds += time.monotonic() - wait.started

    def close(self) -> None:
        """Ends the writer; a blocked `insert` raises within two seconds. May be called twice."""
        self._closed.set()
        with self._lock:
            # A stream that is still open would hold up the server's end for five seconds.
            if self._writer is not None:
                self._writer.close()


class UnrollReader:
    """Reads batches of unrolls, each once, in order. Owned by one thread; any may close it."""

    def __init__(
        self, address: str, queue_layout: QueueLayout, config: configs.TrajectoryQueueConfig
    ) -> None:
        """Connects to a queue. See `UnrollWriter`."""
        self._layout = queue_layout
        self._address = address
        self._warn = config.warn_seconds
        self._client = reverb.Client(address)
        self._blocks = queue_layout.batch_size // queue_layout.unrolls_per_item
        # The public `Client.sample` makes the same sampler but keeps it out of reach, so that a
        # blocked one cannot be cancelled; `Sampler.Close` does that.
        self._sampler = self._client._client.NewSampler(_TABLE, 1 << 62, 1)
        self._closed = threading.Event()
        self._wait: _Wait | None = None
        self._threads = threads.ThreadGroup("trajectory queue reader")
        self._threads.on_error(self._sampler.Close)
        self._threads.start(self._watch, "watch")
        self.wait_seconds = 0.0

    def _watch(self) -> None:
        """Looks after a blocked read, which has no timeout of its own."""
        while not self._closed.wait(0.2):
            wait = self._wait
            if wait is not None:
                wait.check()

    def __iter__(self) -> Iterator[Sample]:
        """Returns itself."""
        return self

    def __next__(self) -> Sample:
        """Returns the next batch, unrolls of leaves `[batch_size, L, ...]`; waits for it.

        Raises:
          StopIteration: the reader is closed.
          ConnectionError: the queue's server does not answer.
        """
        wait = self._wait = _Wait(
            self._address,
            self._client,
            self._warn,
            f"trajectory queue: a reader has waited %.0f s for {self._layout.batch_size} unrolls; "
            "the actors do not bring enough",
        )
        blocks: list[list[np.ndarray]] = []
        try:
            while len(blocks) < self._blocks:
                if self._closed.is_set():
                    raise StopIteration
                # The first four columns describe the item: key, probability, table size, priority.
                blocks.append([column[0] for column in self._sampler.GetNextTrajectory()[4:]])
        except RuntimeError:
            if self._closed.is_set():
                raise StopIteration from None
            self._threads.check()
            raise
        finally:
            self._wait = None
        self.wait_seconds += time.monotonic() - wait.started
        leaves = (
            blocks[0]
            if len(blocks) == 1
            else [np.concatenate(leaves) for leaves in zip(*blocks, strict=True)]
        )
        return Sample(tree.unflatten_as(self._layout.unroll_spec, leaves))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Refuses: a queue has none.

        Raises:
          TypeError: always.
        """
        raise TypeError("a trajectory queue has no priorities; use a replay")

    def begin_close(self) -> None:
        """Lets the reader end with its server, which is faster than `close` alone."""
        self._closed.set()

    def close(self) -> None:
        """Ends the reader; a blocked read ends within about three seconds. May be called twice."""
        self._closed.set()
        self._sampler.Close()
        self._threads.join(timeout=10.0)
