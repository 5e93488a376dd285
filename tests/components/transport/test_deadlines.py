"""Functions that are called when their time has come."""

import queue
import threading

import pytest

from seedlib.components.transport import deadlines
from tests.components.transport import fakes


def _make():
    calls = queue.Queue()
    return deadlines.Deadlines("test-deadlines"), calls


def test_a_deadline_is_called_once_it_has_passed():
    watch, calls = _make()
    watch.add(lambda: calls.put("called")).set(0.01)
    assert calls.get(timeout=fakes.PATIENCE) == "called"
    watch.close()
    assert calls.empty()


def test_an_earlier_deadline_set_later_is_called_first():
    watch, calls = _make()
    far, near = watch.add(lambda: calls.put("far")), watch.add(lambda: calls.put("near"))
    far.set(1000.0)
    near.set(0.0)
    assert calls.get(timeout=fakes.PATIENCE) == "near"
    far.set(0.0)
    assert calls.get(timeout=fakes.PATIENCE) == "far"
    watch.close()


def test_cleared_and_removed_deadlines_are_not_called():
    watch, calls = _make()
    cleared, removed = watch.add(lambda: calls.put("cleared")), watch.add(lambda: calls.put("gone"))
    cleared.set(1000.0)
    removed.set(1000.0)
    cleared.clear()
    removed.remove()
    removed.set(0.0)
    last = watch.add(lambda: calls.put("last"))
    last.set(0.0)
    assert calls.get(timeout=fakes.PATIENCE) == "last"
    watch.close()
    assert calls.empty()


def test_a_callback_that_raises_does_not_end_the_others():
    watch, calls = _make()
    watch.add(lambda: 1 / 0).set(0.0)
    watch.add(lambda: calls.put("called")).set(0.01)
    assert calls.get(timeout=fakes.PATIENCE) == "called"
    watch.close()


def test_close_joins_the_thread_and_refuses_more():
    before = threading.active_count()
    watch, _ = _make()
    assert threading.active_count() == before  # None is made before it is needed.
    watch.add(lambda: None).set(1000.0)
    watch.close()
    watch.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="test-deadlines is closed"):
        watch.add(lambda: None)
