"""Tests of the request batcher: who is answered, with what, when, and in which memory."""

import collections
import contextlib
import threading

import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.components import batcher as batcher_lib
from tests.components import harness

SPEC = {"value": dm_specs.Array((), np.int64), "pair": (dm_specs.Array((2,), np.float32),)}


def make_batcher(sizes=(1, 2, 4, 8), **config):
    return batcher_lib.RequestBatcher(SPEC, batcher_lib.BatcherConfig(sizes, **config))


def rows_of(*values):
    value = np.array(values, np.int64)
    return {"value": value, "pair": (np.stack([value, -value], 1).astype(np.float32),)}


def answer_to(rows):
    """What the consumer of these tests answers: something of every leaf."""
    return rows["value"] * 3 + rows["pair"][0][:, 1].astype(np.int64)  # 3 v - v = 2 v


@contextlib.contextmanager
def consuming(batcher, on_batch=lambda batch: None):
    """Runs a consumer that answers with `(answer, number of the batch)`."""

    def consume():
        try:
            for number in range(1, 1 << 60):
                batch = batcher.next_batch()
                on_batch(batch)
                answer = answer_to(batch.rows)
                batch.complete((answer, np.full(batch.padded_size, number)))
                batch.release()
        except batcher_lib.BatcherClosed:
            return

    consumer = harness.Call(consume)
    try:
        yield
    finally:
        batcher.close()
        consumer.result()


@pytest.mark.parametrize("live", [1, 3, 7, 8, 9])
@pytest.mark.parametrize("minimum", [1, 8])
def test_every_live_request_is_answered_by_one_of_the_next_steps(live, minimum):
    # One batch is being taken; up to a batch of live requests all fit in the one that fills, which
    # is the next. Of nine, eight may be in a full batch between the two.
    most = 2 if live <= 8 else 3
    batcher = make_batcher(minimum_batch_size=minimum, timeout=0.001)
    with consuming(batcher):

        def ask(me):
            for i in range(30):
                value = 1000 * me + i
                request = batcher.submit(rows_of(value), timeout=harness.PATIENCE)
                taken = batcher.statistics.batches
                answer, batch = request.result(harness.PATIENCE)
                np.testing.assert_array_equal(answer, [2 * value])
                assert batch[0] - taken <= most

        harness.together([lambda me=me: ask(me) for me in range(live)])
    assert batcher.statistics.rows == 30 * live


def test_answers_are_those_of_a_request_alone():
    requests = [rows_of(*range(start, start + count)) for start, count in ((5, 1), (9, 3), (20, 4))]
    alone = []
    batcher = make_batcher()
    for rows in requests:
        request = batcher.submit(rows)
        batch = batcher.next_batch(harness.PATIENCE)
        batch.complete(answer_to(batch.rows))
        batch.release()
        alone.append(request.result(0))
    waiting = [batcher.submit(rows) for rows in requests]
    batch = batcher.next_batch(harness.PATIENCE)
    batch.complete(answer_to(batch.rows))
    for request, expected in zip(waiting, alone, strict=True):
        np.testing.assert_array_equal(request.result(0), expected)


def test_a_request_of_several_rows_is_never_split():
    batcher = make_batcher()
    for start in (0, 10, 20):  # 3 + 3 rows leave room for 2 of 8; the third one waits for the next.
        batcher.submit(rows_of(start, start + 1, start + 2), tag=start)
    first, second = batcher.next_batch(0), batcher.next_batch(0)
    assert [(r.tag, r.start, r.stop) for r in first.requests] == [(0, 0, 3), (10, 3, 6)]
    assert [(r.tag, r.start, r.stop) for r in second.requests] == [(20, 0, 3)]
    np.testing.assert_array_equal(first.rows["value"][:6], [0, 1, 2, 10, 11, 12])
    np.testing.assert_array_equal(second.rows["value"][:3], [20, 21, 22])


@pytest.mark.parametrize(("size", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_a_batch_is_padded_to_the_smallest_size_that_holds_it(size, padded):
    batcher = make_batcher()
    batcher.submit(rows_of(*range(size)))
    batch = batcher.next_batch(0)
    assert (batch.size, batch.padded_size) == (size, padded)
    assert batch.rows["value"].shape == (padded,)
    assert batch.rows["pair"][0].shape == (padded, 2)


def test_the_ninth_of_nine_is_in_the_second_batch():
    batcher = make_batcher()
    for value in range(9):
        batcher.submit(rows_of(value))
    assert [batcher.next_batch(0).size, batcher.next_batch(0).size] == [8, 1]
    assert batcher.next_batch(0) is None


def test_a_batch_below_the_minimum_waits_for_rows():
    batcher = make_batcher(minimum_batch_size=3, timeout=harness.PATIENCE)
    batcher.submit(rows_of(1))
    assert batcher.next_batch(0) is None
    batcher.submit(rows_of(2, 3))
    assert batcher.next_batch(0).size == 3


def test_a_lone_request_below_the_minimum_is_taken_after_the_timeout():
    batcher = make_batcher(minimum_batch_size=8, timeout=0.02)
    batcher.submit(rows_of(1))
    batch = batcher.next_batch(harness.PATIENCE)
    assert batch.size == 1
    assert batch.wait_seconds >= 0.02


def test_rows_that_come_while_the_consumer_waits_make_the_batch_due():
    batcher = make_batcher(minimum_batch_size=2, timeout=harness.PATIENCE)
    consumer = harness.Call(batcher.next_batch)
    batcher.submit(rows_of(1))
    batcher.submit(rows_of(2))
    assert consumer.result().size == 2


def test_two_batches_are_in_flight_while_a_third_fills():
    batcher = make_batcher(buffers=3)
    requests = [batcher.submit(rows_of(1))]
    first = batcher.next_batch(0)
    requests.append(batcher.submit(rows_of(2)))
    second = batcher.next_batch(0)
    requests.append(batcher.submit(rows_of(3)))
    second.complete(answer_to(second.rows))
    first.complete(answer_to(first.rows))  # In any order.
    third = batcher.next_batch(0)
    third.complete(answer_to(third.rows))
    assert [request.result(0).tolist() for request in requests] == [[2], [4], [6]]
    memory = [batch.rows["value"] for batch in (first, second, third)]
    assert not any(np.shares_memory(memory[i], memory[i - 1]) for i in range(3))


def test_without_room_a_request_is_refused_in_time_and_room_comes_with_a_release():
    batcher = make_batcher(sizes=(2,), buffers=2)
    for _ in range(2):
        batcher.submit(rows_of(1, 2))
    with pytest.raises(batcher_lib.RequestTimeout, match=r"no room in 2 batches within 0\.010 s"):
        batcher.submit(rows_of(3), timeout=0.01)
    waiting = harness.Call(batcher.submit, rows_of(3), timeout=harness.PATIENCE)
    batcher.next_batch(0).release()
    assert waiting.result().stop == 1


def test_an_answer_that_does_not_come_is_a_timeout():
    request = make_batcher().submit(rows_of(1))
    with pytest.raises(batcher_lib.RequestTimeout, match="no answer"):
        request.result(0.001)


def test_close_wakes_submitters_and_waiters():
    batcher = make_batcher(sizes=(1,), buffers=2)
    filling, taken = batcher.submit(rows_of(1)), batcher.submit(rows_of(2))
    batch = batcher.next_batch(0)
    assert batch.requests == [filling]
    calls = [
        harness.Call(batcher.submit, rows_of(3)),  # Waits for room.
        harness.Call(filling.result),
        harness.Call(taken.result),
    ]
    batcher.close()
    batcher.close()
    for call in calls:
        with pytest.raises(batcher_lib.BatcherClosed):
            call.result()
    with pytest.raises(batcher_lib.BatcherClosed):
        batcher.submit(rows_of(4))
    batch.complete(answer_to(batch.rows))  # Too late, but no error.
    batch.release()


def test_close_wakes_the_consumer():
    batcher = make_batcher()
    consumer = harness.Call(batcher.next_batch)
    batcher.close()
    with pytest.raises(batcher_lib.BatcherClosed):
        consumer.result()


class SlowArray:
    """An array that takes its time to be copied."""

    def __init__(self, array):
        self.shape, self.dtype = array.shape, array.dtype
        self.copying, self.go_on = threading.Event(), threading.Event()
        self._array = array

    def __array__(self, dtype=None, copy=None):
        self.copying.set()
        assert self.go_on.wait(harness.PATIENCE)
        return self._array


def test_the_consumer_waits_for_rows_that_are_still_being_copied():
    batcher = make_batcher()
    rows = rows_of(7)
    slow = SlowArray(rows["value"])
    submitter = harness.Call(batcher.submit, {**rows, "value": slow})
    assert slow.copying.wait(harness.PATIENCE)
    consumer = harness.Call(batcher.next_batch)
    slow.go_on.set()
    assert consumer.result().rows["value"].tolist() == [7]
    submitter.result()


def test_close_while_rows_are_copied_fails_their_request():
    batcher = make_batcher()
    rows = rows_of(7)
    slow = SlowArray(rows["value"])
    submitter = harness.Call(batcher.submit, {**rows, "value": slow})
    assert slow.copying.wait(harness.PATIENCE)
    consumer = harness.Call(batcher.next_batch)
    harness.wait_until(lambda: batcher._filling is None)  # The consumer has it, and waits.
    batcher.close()
    slow.go_on.set()
    with pytest.raises(batcher_lib.BatcherClosed):
        submitter.result().result(0)
    with pytest.raises(batcher_lib.BatcherClosed):
        consumer.result()


def test_a_failing_batch_fails_only_its_own_requests():
    batcher = make_batcher(sizes=(2,))
    requests = [batcher.submit(rows_of(value)) for value in range(6)]
    for number in range(3):
        batch = batcher.next_batch(0)
        if number == 1:
            batch.fail(ZeroDivisionError("bad batch"))
        else:
            batch.complete(answer_to(batch.rows))
        batch.release()
    for value in (0, 1, 4, 5):
        assert requests[value].result(0).tolist() == [2 * value]
    for value in (2, 3):
        for _ in range(2):  # Asked again it says the same.
            with pytest.raises(ZeroDivisionError, match="bad batch"):
                requests[value].result(0)


def test_a_released_batch_leaves_nobody_waiting():
    batcher = make_batcher()
    request = batcher.submit(rows_of(1))
    batch = batcher.next_batch(0)
    batch.release()
    batch.release()
    with pytest.raises(batcher_lib.BatcherClosed, match="without an answer"):
        request.result(0)


@pytest.mark.parametrize("answer", [np.zeros(2), np.float32(0)])
def test_an_answer_with_too_few_rows_is_an_error_and_answers_nobody(answer):
    batcher = make_batcher()
    request = batcher.submit(rows_of(1, 2, 3))
    batch = batcher.next_batch(0)
    with pytest.raises(ValueError, match="a batch of 3 rows got an answer of shape"):
        batch.complete((np.zeros(3), answer))
    batch.fail(RuntimeError("no answer"))
    with pytest.raises(RuntimeError, match="no answer"):
        request.result(0)


def test_a_cancelled_request_wakes_and_its_late_answer_goes_to_nobody():
    batcher = make_batcher()
    cancelled, other = batcher.submit(rows_of(1)), batcher.submit(rows_of(2))
    waiter = harness.Call(cancelled.result)
    cancelled.cancel(KeyError("gone"))
    with pytest.raises(KeyError, match="gone"):
        waiter.result()
    batch = batcher.next_batch(0)
    assert batch.size == 2
    batch.complete(answer_to(batch.rows))
    assert other.result(0).tolist() == [4]
    with pytest.raises(KeyError):
        cancelled.result(0)


def test_an_answer_is_not_undone_by_a_cancellation():
    batcher = make_batcher()
    request = batcher.submit(rows_of(1))
    batch = batcher.next_batch(0)
    batch.complete(answer_to(batch.rows))
    request.cancel(KeyError("too late"))
    assert request.result(0).tolist() == [2]


def test_who_waits_for_room_can_be_cancelled():
    batcher = make_batcher(sizes=(1,), buffers=2)
    for value in range(2):
        batcher.submit(rows_of(value))
    gone = threading.Event()
    waiting = harness.Call(batcher.submit, rows_of(3), cancelled=gone.is_set)
    gone.set()
    batcher.wake()
    with pytest.raises(batcher_lib.RequestCancelled):
        waiting.result()


def test_completion_and_close_at_once_answer_every_request_once():
    for _ in range(200):
        batcher = make_batcher()
        requests = [batcher.submit(rows_of(value)) for value in range(8)]
        batch = batcher.next_batch(0)
        answer = answer_to(batch.rows)
        barrier = threading.Barrier(2)

        def complete(barrier=barrier, batch=batch, answer=answer):
            barrier.wait(harness.PATIENCE)
            batch.complete(answer)

        def close(barrier=barrier, batcher=batcher):
            barrier.wait(harness.PATIENCE)
            batcher.close()

        harness.together([complete, close])
        for value, request in enumerate(requests):
            with contextlib.suppress(batcher_lib.BatcherClosed):
                assert request.result(0).tolist() == [2 * value]


def test_many_threads_get_every_row_answered_exactly_once_with_its_own_value():
    batcher = make_batcher(sizes=(4, 16), buffers=3)
    seen = collections.Counter()
    threads, requests = 64, 200

    def note(batch):
        seen.update(batch.rows["value"][: batch.size].tolist())

    def ask(me):
        random = np.random.default_rng(me)
        next_value = me << 32
        for _ in range(requests):
            count = int(random.integers(1, 9))
            values = np.arange(next_value, next_value + count)
            next_value += count
            pair = np.zeros((count, 2), np.float32)
            request = batcher.submit({"value": values, "pair": (pair,)}, timeout=harness.PATIENCE)
            answer, _ = request.result(harness.PATIENCE)
            np.testing.assert_array_equal(answer, 3 * values)
        return next_value - (me << 32)

    with consuming(batcher, note):
        counts = harness.together([lambda me=me: ask(me) for me in range(threads)])
    expected = {(me << 32) + i for me, count in enumerate(counts) for i in range(count)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}
    assert batcher.statistics.rows == len(expected)


BAD_ROWS = {
    "shape": ({**rows_of(1), "pair": (np.zeros((1, 3), np.float32),)}, r"pair/0: .*\(1, 2\).*1, 3"),
    "rank": ({**rows_of(1), "value": np.zeros((1, 1), np.int64)}, r"value: .*\(1,\).*\(1, 1\)"),
    "rows": ({**rows_of(1, 2), "pair": rows_of(1)["pair"]}, r"value: .*\(1,\), got int64 \(2,\)"),
    "dtype": ({**rows_of(1), "value": np.zeros(1)}, r"value: expected int64 \(1,\), got float64"),
    "text": ({**rows_of(1), "value": np.array(["a"])}, r"value: expected int64 \(1,\), got <U1"),
    "leaves": ({"value": np.zeros(1, np.int64)}, "expected 2 leaves, got 1"),
    "none": (rows_of(), "a request has 0 rows"),
    "scalar": ({"value": np.int64(1), "pair": (np.float32(1),)}, "a request has 0 rows"),
    "many": (rows_of(*range(9)), "a request has 9 rows; the largest batch size is 8"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused_before_they_take_a_place(case):
    rows, message = BAD_ROWS[case]
    batcher = make_batcher()
    before = batcher.submit(rows_of(1))
    with pytest.raises(ValueError, match=message):
        batcher.submit(rows)
    after = batcher.submit(rows_of(2))
    batch = batcher.next_batch(0)
    assert batch.size == 2
    batch.complete(answer_to(batch.rows))
    assert [before.result(0).tolist(), after.result(0).tolist()] == [[2], [4]]


def test_buffers_are_reused_however_many_batches_there_are():
    batcher = make_batcher(buffers=3)
    addresses = set()

    def note(batch):
        addresses.add(batch.rows["value"].ctypes.data)

    with consuming(batcher, note):

        def ask(me):
            for i in range(300):
                batcher.submit(rows_of(me, i), timeout=harness.PATIENCE).result(harness.PATIENCE)

        harness.together([lambda me=me: ask(me) for me in range(4)])
    assert len(addresses) <= 3


def test_statistics_count_rows_and_padding():
    batcher = make_batcher()
    for count in (3, 8, 1):
        batcher.submit(rows_of(*range(count)))
        batcher.next_batch(0).release()
    statistics = batcher.statistics
    # 3 is padded to 4; 8 and 1 are sizes.
    assert (statistics.batches, statistics.rows, statistics.padded_rows) == (3, 12, 13)


@pytest.mark.parametrize(
    ("rows", "requests", "largest", "sizes"),
    [
        (1, 8, 256, (1, 2, 4, 8)),
        (4, 3, 256, (4, 8, 12)),
        (32, 100, 256, (32, 64, 128, 256)),
        (300, 2, 256, (300,)),  # A request is never split, so one must fit.
        (1, 1, 256, (1,)),
    ],
)
def test_padded_sizes_double_up_to_all_requests(rows, requests, largest, sizes):
    assert batcher_lib.padded_sizes(rows, requests, largest) == sizes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes must be positive and ascending"),
        ({"batch_sizes": (4, 2)}, r"batch_sizes must be .*\(4, 2\)"),
        ({"batch_sizes": (0, 2)}, "batch_sizes must be"),
        ({"batch_sizes": (2,), "minimum_batch_size": 3}, r"minimum_batch_size must be in 1\.\.2"),
        ({"batch_sizes": (2,), "timeout": -1.0}, "timeout must not be negative, got -1.0"),
        ({"batch_sizes": (2,), "buffers": 1}, "buffers must be at least 2"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        batcher_lib.BatcherConfig(**config)
