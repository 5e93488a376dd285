"""The trajectory queue in and out, next to the plain ways to write and read a Reverb table.

    python -m benchmarks.table [--quick] [--json=FILE]

A table is filled, then emptied, so that each direction has its own cost.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import reverb
import tensorflow as tf
import tree

from benchmarks import harness, parts
from seedlib import types
from seedlib.components import configs, trajectory_queue

COLUMNS = (
    harness.Column("unroll", "unroll"),
    harness.Column("write", "written"),
    harness.Column("read", "read"),
    harness.Column("per_item", "unrolls/item"),
    harness.Column("in_per_second", "in/s"),
    harness.Column("in_us", "in CPU us", spread=True),
    harness.Column("out_per_second", "out/s"),
    harness.Column("out_us", "out CPU us", spread=True),
    harness.Column("both_us", "both CPU us", spread=True),
    harness.Column("ratio", "both/queue", 2),
)

_TABLE = "table"
_BATCH = 32
_UNROLLS = {"16 B": "mlp", "84x84x4": "shallow"}
_READERS = ("Client.sample", "tf.data")
# An item larger than this is no longer one message of a sane size.
_MAX_ITEM_BYTES = 10_000_000
# The first batch pays for connections and for building pipelines.
_UNTIMED = 1

Batches = Iterator[Any]
"""Each `next` writes, or reads, one batch of unrolls."""


class _Way(NamedTuple):
    """A way into a table and out of it.

    Attributes:
      write: how an unroll is written.
      read: how it is read.
      block: unrolls per item.
      open: `open(capacity in unrolls)` serves a table, and yields how to fill and to empty it.
    """

    write: str
    read: str
    block: int
    open: Callable[[int], contextlib.AbstractContextManager[tuple[Batches, Batches]]]


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    rows: list[dict[str, Any]] = []
    batches = {"16 B": options.pick(64, 24, 3), "84x84x4": options.pick(16, 6, 3)}
    for name, torso in _UNROLLS.items():
        case = parts.make_case(torso)
        spec, unrolls = case.unroll_specs, parts.make_unrolls(case, _BATCH)
        size = sum(leaf[0].nbytes for leaf in tree.flatten(unrolls))
        blocks = [k for k in (1, 4, 16, 32) if k == 1 or k * size <= _MAX_ITEM_BYTES]
        ways = _ways(spec, unrolls, options.pick(blocks, blocks, blocks[-1:]))
        # All ways in turn, then all again, so that each sees the same disturbances.
        runs = [[_run(way, batches[name]) for way in ways] for _ in range(options.runs)]
        own = [
            _row(name, way, [run[number] for run in runs], batches[name])
            for number, way in enumerate(ways)
        ]
        chosen = trajectory_queue.layout(spec, _BATCH, configs.TrajectoryQueueConfig())
        _add_ratios(own, chosen.unrolls_per_item)
        rows += own
    title = f"Reverb table in and out, T = 20, batches of {_BATCH}; CPU per unroll"
    return [harness.Table(title, COLUMNS, rows)]


def _ways(spec: types.Unroll, unrolls: types.Unroll, blocks: Sequence[int]) -> list[_Way]:
    ways = []
    for block in blocks:
        ways.append(_Way("whole", "queue", block, _queue(spec, unrolls, block)))
        for reader in _READERS:
            ways.append(_Way("whole", reader, block, _plain(spec, unrolls, block, reader)))
    for reader in _READERS:
        ways.append(_Way("stepwise", reader, 1, _plain(spec, unrolls, None, reader)))
    return ways


def _run(way: _Way, batches: int) -> tuple[harness.Cost, harness.Cost]:
    """Fills a table and empties it; returns what each took, without the first batch."""

    def drain(source: Batches, count: int) -> None:
        for _ in range(count):
            next(source)

    with way.open(batches * _BATCH) as (fill, empty):
        drain(fill, _UNTIMED)
        into = harness.cost_of(lambda: drain(fill, batches - _UNTIMED))
        drain(empty, _UNTIMED)
        return into, harness.cost_of(lambda: drain(empty, batches - _UNTIMED))


def _row(
    unroll: str, way: _Way, runs: Sequence[tuple[harness.Cost, harness.Cost]], batches: int
) -> dict[str, Any]:
    count = (batches - _UNTIMED) * _BATCH
    us = lambda seconds: harness.spread(each / count * 1e6 for each in seconds)
    return {
        "unroll": unroll,
        "write": way.write,
        "read": way.read,
        "per_item": way.block,
        "in_per_second": harness.spread(count / into.seconds for into, _ in runs),
        "out_per_second": harness.spread(count / out.seconds for _, out in runs),
        "in_us": us(into.cpu_seconds for into, _ in runs),
        "out_us": us(out.cpu_seconds for _, out in runs),
        "both_us": us(into.cpu_seconds + out.cpu_seconds for into, out in runs),
    }


def _add_ratios(rows: Sequence[dict[str, Any]], block: int) -> None:
    """Compares each way with the queue at the block that it chooses by itself."""
    queue = [row for row in rows if row["read"] == "queue"]
    reference = min(queue, key=lambda row: abs(row["per_item"] - block))
    for row in rows:
        row["ratio"] = row["both_us"].median / reference["both_us"].median


def _queue(
    spec: types.Unroll, unrolls: types.Unroll, block: int
) -> Callable[[int], contextlib.AbstractContextManager[tuple[Batches, Batches]]]:
    """The library's own queue, with its writer and reader."""

    @contextlib.contextmanager
    def opened(capacity: int) -> Iterator[tuple[Batches, Batches]]:
        config = configs.TrajectoryQueueConfig(capacity=capacity + block, unrolls_per_item=block)
        queue = trajectory_queue.TrajectoryQueue(
            trajectory_queue.layout(spec, _BATCH, config), config
        )
        try:
            fill = map(queue.writer().insert, itertools.repeat(unrolls))
            yield fill, queue.reader()
        finally:
            queue.stop()

    return opened


def _plain(
    spec: types.Unroll, unrolls: types.Unroll, block: int | None, reader: str
) -> Callable[[int], contextlib.AbstractContextManager[tuple[Batches, Batches]]]:
    """Reverb by itself: blocks of whole unrolls, or step by step where `block` is None."""

    def signature_of(leaf: Any) -> tf.TensorSpec:
        # A row of the table is a step, or a block of unrolls.
        shape = leaf.shape[1:] if block is None else (block, *leaf.shape)
        return tf.TensorSpec((None, *shape), np.dtype(leaf.dtype))

    signature = _columns(tree.map_structure(signature_of, spec))
    read = {"Client.sample": _read_with_sample, "tf.data": _read_with_dataset}[reader]
    size = block or 1

    @contextlib.contextmanager
    def opened(capacity: int) -> Iterator[tuple[Batches, Batches]]:
        items = capacity // size
        server = reverb.Server([reverb.Table.queue(_TABLE, items + 1, signature=signature)])
        try:
            client = reverb.Client(f"localhost:{server.port}")
            fill = _stepwise(client, unrolls) if block is None else _whole(client, unrolls, block)
            empty = read(client, items, _BATCH // size)
            with contextlib.closing(fill), contextlib.closing(empty):
                yield fill, empty
        finally:
            server.stop()

    return opened


def _columns(unroll: types.Unroll) -> dict[str, Any]:
    return {f"{number:03d}": leaf for number, leaf in enumerate(tree.flatten(unroll))}


def _whole(client: reverb.Client, unrolls: types.Unroll, block: int) -> Generator[None, None, None]:
    """Writes a block of unrolls as one Reverb step and one item."""
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        while True:
            for start in range(0, _BATCH, block):
                rows = operator.itemgetter(slice(start, start + block))
                writer.append(_columns(tree.map_structure(rows, unrolls)))
                _create_item(writer, 1)
            writer.flush()
            yield


def _stepwise(client: reverb.Client, unrolls: types.Unroll) -> Generator[None, None, None]:
    """Writes step by step as actors usually do; consecutive unrolls share a step."""
    window = unrolls.inputs.reward.shape[1]
    one = _columns(tree.map_structure(lambda leaf: leaf[0], unrolls))
    # A recurrent state would be of the first step alone; these unrolls have none.
    steps = [{key: leaf[step] for key, leaf in one.items()} for step in range(window)]
    with client.trajectory_writer(num_keep_alive_refs=window) as writer:
        writer.append(steps[0])
        while True:
            for _ in range(_BATCH):
                for step in steps[1:]:
                    writer.append(step)
                _create_item(writer, window)
            writer.flush()  # Else the last item waits for a chunk that no step fills any more.
            yield


def _create_item(writer: reverb.TrajectoryWriter, steps: int) -> None:
    trajectory = tree.map_structure(lambda column: column[-steps:], writer.history)
    writer.create_item(_TABLE, 1.0, trajectory)
    writer.flush(block_until_num_items=1)


def _read_with_sample(
    client: reverb.Client, items: int, items_per_batch: int
) -> Generator[list[np.ndarray], None, None]:
    """Reads with `Client.sample`, and puts batches together in NumPy."""
    samples = client.sample(_TABLE, num_samples=items, emit_timesteps=False)
    for _ in range(items // items_per_batch):
        batch = [next(samples).data for _ in range(items_per_batch)]
        yield [np.stack(leaves) for leaves in zip(*batch, strict=True)]


def _read_with_dataset(
    client: reverb.Client, items: int, items_per_batch: int
) -> Generator[Any, None, None]:
    """Reads with tf.data."""
    dataset = reverb.TrajectoryDataset.from_table_signature(
        server_address=client.server_address,
        table=_TABLE,
        max_in_flight_samples_per_worker=items_per_batch,
        # Its workers want more than there is; they shall not hold up the end.
        rate_limiter_timeout_ms=200,
    )
    dataset = dataset.map(lambda sample: sample.data).batch(items_per_batch).prefetch(1)
    yield from dataset.take(items // items_per_batch).as_numpy_iterator()


if __name__ == "__main__":
    harness.main("table", "Measure the trajectory queue.", measure)
