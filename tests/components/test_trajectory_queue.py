"""A queue gives each unroll once, in order and unchanged, holds writers up, and ends at once."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tree

import seedlib
from seedlib import types
from seedlib.components import configs, tables, trajectory_queue
from tests.components import learning

ROOT = str(pathlib.Path(seedlib.__file__).parents[1])


@pytest.fixture
def make_queue():
    """`make_queue(batch_size, spec=..., **config)`; every queue is stopped after the test."""
    queues = []

    def make(batch_size, spec=None, **config):
        config = configs.TrajectoryQueueConfig(**config)
        layout = trajectory_queue.layout(spec or learning.unroll_spec(), batch_size, config)
        queues.append(trajectory_queue.TrajectoryQueue(layout, config))
        return queues[-1]

    yield make
    for queue in queues:
        queue.stop()


@pytest.fixture
def warnings():
    """Messages that are logged; `warnings.wait()` waits for one."""
    with learning.Log() as log:
        yield log


def numbered(start, stop, length=2):
    """Unrolls `start .. stop - 1`: the environment id is the number, the rest is random."""
    return learning.make_unrolls(stop - start, length, seed=start, first_id=start)


def spec_of(unrolls):
    # Arrays of no rows have shape and dtype too; JAX's own would narrow 64 bit.
    return tree.map_structure(lambda leaf: np.empty(leaf.shape[1:], leaf.dtype), unrolls)


def rows_of(unrolls, start, stop):
    return tree.map_structure(lambda leaf: leaf[start:stop], unrolls)


def numbers(sample):
    return sample.unrolls.inputs.environment_id[:, 0].tolist()


def assert_same(got, expected):
    tree.assert_same_structure(got, expected)
    for (path, a), b in zip(tree.flatten_with_path(got), tree.flatten(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_array_equal(a, b, err_msg=str(path))


@pytest.mark.parametrize("block", [1, 2, 3, 6, None])
@pytest.mark.parametrize("chunks", [[1] * 36, [36], [5, 1, 13, 4, 7, 6], [0, 2, 34]], ids=str)
def test_each_unroll_comes_out_once_and_in_order(make_queue, block, chunks):
    # Whatever the size of blocks and of what is inserted at once; 36 unrolls are six batches, and
    # the table holds two, so that the writer is held up on the way.
    queue = make_queue(6, unrolls_per_item=block)
    reader, writer = queue.reader(), queue.writer()
    every = numbered(0, 36)
    ends = np.cumsum(chunks)

    def write():
        for size, end in zip(chunks, ends, strict=True):
            writer.insert(rows_of(every, end - size, end))

    writing = learning.Call(write)
    for start in range(0, 36, 6):
        assert_same(next(reader).unrolls, rows_of(every, start, start + 6))
    writing.result()
    assert queue.unrolls() == 0


def test_leaves_of_every_type_and_shape_are_unchanged(make_queue):
    every = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64]
    every += [np.float16, np.float32, np.float64]
    rng = np.random.default_rng(0)

    def leaves(count, window):
        # Every bit pattern may occur, but in a boolean: NaN, infinities and subnormal numbers too.
        made = {}
        for dtype in every:
            for shape in ((), (0,), (2, 3)):
                size = (count, *window, *shape)
                width = np.dtype(dtype).itemsize
                raw = rng.integers(0, 2 if dtype is np.bool_ else 256, (*size, width), np.uint8)
                made[f"{np.dtype(dtype)}{shape}"] = raw.view(dtype)[..., 0]
        return made

    unrolls = learning.make_unrolls(4)
    unrolls = unrolls._replace(
        inputs=unrolls.inputs._replace(observation=(leaves(4, (3,)), [{"x": leaves(4, (3,))}])),
        initial_state=(leaves(4, ()), ()),
        extras={},
    )
    queue = make_queue(2, spec_of(unrolls))
    queue.writer().insert(unrolls)
    reader = queue.reader()
    for start in (0, 2):
        got = tree.flatten_with_path(next(reader).unrolls)
        expected = tree.flatten(rows_of(unrolls, start, start + 2))
        for (path, a), b in zip(got, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), path
            assert a.tobytes() == b.tobytes(), path


def test_what_a_reader_got_stays_when_more_is_read(make_queue):
    queue = make_queue(2)
    reader, writer = queue.reader(), queue.writer()
    writer.insert(numbered(0, 4))
    first = next(reader)
    before = tree.map_structure(np.copy, first.unrolls)
    next(reader)
    assert_same(first.unrolls, before)


def test_a_full_queue_holds_its_writer_up_and_says_so(make_queue, warnings):
    queue = make_queue(4, capacity=8, unrolls_per_item=2, warn_seconds=0.05)
    writer = queue.writer()
    inserted = []

    def write():
        for number in range(1000):
            writer.insert(numbered(number, number + 1))
            inserted.append(number)

    writing = learning.Call(write)
    warnings.wait()
    assert "a writer has waited" in warnings.messages[0]
    assert "4 blocks of 2 unrolls" in warnings.messages[0]
    assert "the learner does not take any" in warnings.messages[0]
    assert queue.unrolls() == 8
    # The table, the block that waits, and the one whose `insert` is blocked.
    assert len(inserted) <= 8 + 2 + 2
    assert writing.running
    reader = queue.reader()
    assert numbers(next(reader)) == [0, 1, 2, 3]
    writer.close()
    with pytest.raises(tables.SinkClosed, match="closed"):
        writing.result(timeout=2.0)
    assert writer.wait_seconds > 0.0


def test_memory_is_bounded_by_the_capacity(make_queue, warnings):
    queue = make_queue(4, capacity=10, unrolls_per_item=4, warn_seconds=0.05)
    # Ten unrolls are two whole blocks of four.
    assert queue.layout.items == 2
    # 3 steps: 1 + 4 + 4 + 3*4 + 4 + 4 + 1 bytes of inputs, 4 of action, 3*4 of logits, 3*8 of info.
    assert queue.layout.unroll_bytes == 3 * (30 + 4 + 12 + 24)
    writers = [queue.writer() for _ in range(2)]
    calls = [learning.Call(writer.insert, numbered(0, 400)) for writer in writers]
    warnings.wait()
    assert queue.unrolls() <= 8
    for writer, call in zip(writers, calls, strict=True):
        writer.close()
        with pytest.raises(tables.SinkClosed):
            call.result(timeout=2.0)


def test_a_reader_without_unrolls_says_so(make_queue, warnings):
    queue = make_queue(4, unrolls_per_item=2, warn_seconds=0.05)
    reader = queue.reader()
    reading = learning.Call(next, reader)
    warnings.wait()
    assert "a reader has waited" in warnings.messages[0]
    assert "4 unrolls" in warnings.messages[0]
    queue.writer().insert(numbered(0, 4))
    assert numbers(reading.result()) == [0, 1, 2, 3]


def test_closing_a_blocked_reader_ends_it(make_queue, warnings):
    # With half a batch in its hands.
    queue = make_queue(4, unrolls_per_item=2, warn_seconds=0.05)
    queue.writer().insert(numbered(0, 2))
    reader = queue.reader()
    reading = learning.Call(list, reader)
    warnings.wait()
    closing = learning.Call(reader.close)
    assert reading.result(timeout=5.0) == []
    closing.result(timeout=5.0)


def test_many_threads_blocked_in_one_writer_end_together(make_queue, warnings):
    queue = make_queue(2, warn_seconds=0.05)
    writer = queue.writer()
    calls = [learning.Call(writer.insert, numbered(0, 100)) for _ in range(8)]
    warnings.wait()
    learning.Call(writer.close).result(timeout=2.0)
    for call in calls:
        with pytest.raises(tables.SinkClosed):
            call.result(timeout=2.0)


def test_a_closed_end_stays_closed(make_queue):
    queue = make_queue(2)
    writer, reader = queue.writer(), queue.reader()
    for end in (writer, reader):
        end.close()
        end.close()
    with pytest.raises(tables.SinkClosed):
        writer.insert(numbered(0, 2))
    assert list(reader) == []
    assert queue.unrolls() == 0


def test_stopping_a_queue_ends_both_of_its_blocked_ends(make_queue):
    full, empty = make_queue(2, warn_seconds=0.05), make_queue(2, warn_seconds=0.05)
    with learning.Log() as log:
        writing = learning.Call(full.writer().insert, numbered(0, 100))
        log.wait()
    with learning.Log() as log:
        reading = learning.Call(list, empty.reader())
        log.wait()
    learning.Call(full.stop).result(timeout=10.0)
    with pytest.raises(tables.SinkClosed):
        writing.result(timeout=2.0)
    learning.Call(empty.stop).result(timeout=10.0)
    assert reading.result(timeout=2.0) == []
    full.stop()


def test_each_of_two_writers_keeps_its_order(make_queue):
    queue = make_queue(4, unrolls_per_item=2)
    reader = queue.reader()
    ranges = [range(0, 20), range(100, 120)]

    def write(mine):
        writer = queue.writer()
        for number in mine:
            writer.insert(numbered(number, number + 1))

    calls = [learning.Call(write, mine) for mine in ranges]
    got = [number for _ in range(10) for number in numbers(next(reader))]
    for call, mine in zip(calls, ranges, strict=True):
        call.result()
        assert [number for number in got if number in mine] == list(mine)


def test_threads_may_share_a_writer(make_queue):
    queue = make_queue(4, unrolls_per_item=4)
    reader, writer = queue.reader(), queue.writer()

    def write(start):
        for number in range(start, start + 10):
            writer.insert(numbered(number, number + 1))

    calls = [learning.Call(write, start) for start in (0, 10, 20, 30)]
    got = [number for _ in range(10) for number in numbers(next(reader))]
    for call in calls:
        call.result()
    assert sorted(got) == list(range(40))


def test_a_queue_has_no_priorities(make_queue):
    with pytest.raises(TypeError, match="no priorities"):
        make_queue(2).reader().update_priorities(np.zeros(2), np.zeros(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"unrolls_per_item": 3}, "unrolls_per_item 3 does not divide batch_size 8"),
        ({"unrolls_per_item": 16}, "unrolls_per_item 16 does not divide batch_size 8"),
        ({"capacity": 7}, "capacity 7 is less than batch_size 8"),
    ],
)
def test_a_block_or_capacity_that_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message) as error:
        trajectory_queue.layout(learning.unroll_spec(), 8, configs.TrajectoryQueueConfig(**config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "batch", "block"),
    # A step has 4 bytes for each number, and an unroll three steps; a block stays below 2^20 bytes.
    [((1,), 12, 12), ((20_000,), 12, 4), ((200_000,), 12, 1), ((40_000,), 7, 1)],
)
def test_blocks_are_as_large_as_a_megabyte_allows(shape, batch, block):
    unroll = learning.unroll_spec()
    observation = jax.ShapeDtypeStruct((3, *shape), np.float32)
    spec = unroll._replace(inputs=unroll.inputs._replace(observation=observation))
    layout = trajectory_queue.layout(spec, batch, configs.TrajectoryQueueConfig())
    assert layout.unrolls_per_item == block
    assert layout.items * block == 2 * batch


_COMMON = """
import sys
from seedlib.components import configs, tables, trajectory_queue
from tests.components import learning, test_trajectory_queue as here
# 24 MB an unroll, so that no limit of a message's size is met by luck.
unrolls = learning.make_unrolls(2, length=2)
unrolls = unrolls._replace(initial_state=learning.np.zeros((2, 3_000_000), learning.np.float64))
config = configs.TrajectoryQueueConfig(capacity=4)
layout = trajectory_queue.layout(here.spec_of(unrolls), 2, config)
trajectory_queue.UNREACHABLE_SECONDS = 3.0
"""

_SERVER = (
    _COMMON
    + """
queue = trajectory_queue.TrajectoryQueue(layout, config)
print(queue.address, flush=True)
sys.stdin.read()
"""
)

_WRITER = (
    _COMMON
    + """
print("ready", flush=True)
client = trajectory_queue.TrajectoryQueueClient(sys.stdin.readline().strip(), layout, config)
writer = client.writer()
try:
    for number in range(1000):
        learning.np.copyto(unrolls.initial_state, number)
        writer.insert(unrolls._replace(initial_state=unrolls.initial_state.copy()))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
client.close()
"""
)


def _python(code):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"},
        text=True,
    )


def test_other_processes_write_over_the_network_and_end_when_the_server_is_killed(monkeypatch):
    monkeypatch.setattr(trajectory_queue, "UNREACHABLE_SECONDS", 3.0)
    server, writer = _python(_SERVER), _python(_WRITER)
    try:
        address = server.stdout.readline().strip()
        assert address and writer.stdout.readline() == "ready\n"
        config = configs.TrajectoryQueueConfig(capacity=4)
        unrolls = learning.make_unrolls(2, length=2)
        unrolls = unrolls._replace(initial_state=np.zeros((2, 3_000_000)))
        layout = trajectory_queue.layout(spec_of(unrolls), 2, config)
        client = trajectory_queue.TrajectoryQueueClient(address, layout, config)
        reader = client.reader()
        writer.stdin.write(address + "\n")
        writer.stdin.flush()
        for number in range(5):
            got = next(reader).unrolls
            assert_same(got, unrolls._replace(initial_state=np.full((2, 3_000_000), number, float)))
        # Now the table fills again, and the writer is held up when its server dies.
        server.kill()
        server.wait(learning.PATIENCE)

        with pytest.raises(ConnectionError, match=f"queue at {address} has not answered"):
            learning.Call(list, reader).result()
        shown, complaints = writer.communicate(timeout=learning.PATIENCE)
        assert shown.startswith(f"ConnectionError: the trajectory queue at {address} has not answ")
        assert writer.returncode == 0, complaints
        # An end that is closed meanwhile does not wait for the server.
        late = client.writer()
        writing = learning.Call(lambda: [late.insert(unrolls) for _ in range(9)])
        learning.Call(client.close).result(timeout=5.0)
        with pytest.raises((tables.SinkClosed, ConnectionError)):
            writing.result(timeout=2.0)
    finally:
        for process in (server, writer):
            process.kill()
            process.communicate(timeout=learning.PATIENCE)


_ENDING = """
from tests.components import learning, test_trajectory_queue as here
from seedlib.components import configs, tables, trajectory_queue
config = configs.TrajectoryQueueConfig(warn_seconds=0.05)
layout = trajectory_queue.layout(learning.unroll_spec(), 2, config)
full, empty = (trajectory_queue.TrajectoryQueue(layout, config) for _ in range(2))
with learning.Log() as log:
    writing = learning.Call(full.writer().insert, here.numbered(0, 100))
    log.wait()
with learning.Log() as log:
    reading = learning.Call(list, empty.reader())
    log.wait()
full.stop()
empty.stop()
try:
    writing.result()
except tables.SinkClosed:
    print(reading.result())
"""


def test_a_process_whose_queues_are_stopped_ends_without_complaints():
    process = _python(_ENDING)
    shown, complaints = process.communicate(timeout=2 * learning.PATIENCE)
    assert (process.returncode, shown) == (0, "[]\n"), complaints
    for word in ("Traceback", "Exception ignored", "Error", "destroyed"):
        assert word not in complaints, complaints


@pytest.mark.parametrize("block", [1, 2])
def test_a_writer_to_another_process_counts_the_bytes_it_gives_to_reverb(make_queue, block):
    queue = make_queue(4, unrolls_per_item=block)
    config = configs.TrajectoryQueueConfig(unrolls_per_item=block)
    client = trajectory_queue.TrajectoryQueueClient(queue.address, queue.layout, config)
    try:
        near, far = queue.writer(), client.writer()
        unrolls = numbered(0, 3)
        far.insert(unrolls)
        # Of three unrolls a writer in blocks of two keeps the last one back.
        each = sum(leaf.nbytes for leaf in tree.flatten(unrolls)) // 3
        assert far.network_bytes == 3 // block * block * each
        far.insert(numbered(3, 4))
        assert far.network_bytes == 4 * each
        near.insert(numbered(4, 8))
        assert near.network_bytes == 0
    finally:
        client.close()


def test_a_writer_may_be_made_before_its_server(make_queue):
    probe = make_queue(2)
    probe.stop()
    port = int(probe.address.rpartition(":")[2])
    config = configs.TrajectoryQueueConfig()
    client = trajectory_queue.TrajectoryQueueClient(probe.address, probe.layout, config)
    writer = client.writer()
    writing = learning.Call(writer.insert, numbered(0, 2))
    queue = trajectory_queue.TrajectoryQueue(probe.layout, config, port)
    try:
        assert numbers(next(queue.reader())) == [0, 1]
        writing.result()
    finally:
        client.close()
        queue.stop()


def test_a_writer_without_a_server_can_be_closed():
    config = configs.TrajectoryQueueConfig()
    layout = trajectory_queue.layout(learning.unroll_spec(), 2, config)
    # Nothing listens on port 1.
    client = trajectory_queue.TrajectoryQueueClient("localhost:1", layout, config)
    writer = client.writer()
    writing = learning.Call(writer.insert, numbered(0, 2))
    learning.Call(client.close).result(timeout=5.0)
    with pytest.raises(tables.SinkClosed):
        writing.result(timeout=2.0)


def test_types_are_those_of_the_library(make_queue):
    queue = make_queue(2)
    queue.writer().insert(numbered(0, 2))
    sample = next(queue.reader())
    assert isinstance(sample.unrolls, types.Unroll)
    assert isinstance(sample.unrolls.info, types.UnrollInfo)
    assert (sample.weight, sample.keys) == (None, None)
