"""The in-memory queue of programs of one thread."""

import numpy as np
import pytest

from seedlib import types
from seedlib.components import local_queue, tables


def unrolls(numbers):
    """Unrolls of one step whose every leaf is their number."""
    column = np.asarray(numbers, np.float32)[:, None]
    return types.Unroll(
        inputs=types.PolicyInput(*[column] * 3, {"x": column}, column, column, column),
        action=column,
        extras=(),
        initial_state=column[:, 0],
        info=types.UnrollInfo(*[column.astype(np.int64)] * 3),
    )


def test_unrolls_come_out_once_in_order_in_whole_batches():
    queue = local_queue.LocalQueue(batch_size=2, capacity=8)
    queue.insert(unrolls([0, 1, 2]))
    queue.insert(unrolls([3, 4]))
    assert [s.unrolls.inputs.observation["x"][:, 0].tolist() for s in queue] == [[0, 1], [2, 3]]
    assert len(queue) == 1
    queue.insert(unrolls([5]))
    assert next(queue).unrolls.initial_state.tolist() == [4, 5]


def test_a_full_queue_is_an_error_that_names_the_sizes():
    queue = local_queue.LocalQueue(batch_size=2, capacity=3)
    queue.insert(unrolls([0, 1]))
    with pytest.raises(local_queue.QueueFull, match="2 unrolls do not fit: 2 of 3"):
        queue.insert(unrolls([2, 3]))
    assert len(queue) == 2


def test_a_closed_queue_takes_nothing():
    queue = local_queue.LocalQueue(batch_size=1, capacity=1)
    queue.close()
    with pytest.raises(tables.SinkClosed):
        queue.insert(unrolls([0]))


def test_a_queue_that_cannot_hold_a_batch_is_refused():
    with pytest.raises(ValueError, match="capacity 1 is less than batch_size 2"):
        local_queue.LocalQueue(batch_size=2, capacity=1)


def test_it_has_no_priorities():
    with pytest.raises(TypeError, match="replay"):
        local_queue.LocalQueue(1, 1).update_priorities(np.zeros(1), np.zeros(1))
