"""Tests of thread groups: errors come to the owner, and no thread outlives its group unseen."""

import threading

import pytest

from seedlib.components import threads
from tests.components import harness


def fail(error):
    raise error


def test_the_first_exception_of_a_thread_is_raised_in_the_owner():
    group = threads.ThreadGroup("group")
    group.start(lambda: fail(KeyError("first")), "a")
    with pytest.raises(KeyError, match="first"):
        group.wait(harness.PATIENCE)
    group.start(lambda: fail(ValueError("second")), "b")
    group.join(harness.PATIENCE)
    with pytest.raises(KeyError, match="first"):
        group.check()
    assert isinstance(group.error, KeyError)


def test_an_exception_calls_back_once_after_it_is_known():
    group = threads.ThreadGroup("group")
    seen = []
    group.on_error(lambda: seen.append(str(group.error)))
    for text in ("one", "two"):
        group.start(lambda text=text: fail(RuntimeError(text)), text)
        group.join(harness.PATIENCE)
    assert seen == ["one"]


def test_the_traceback_is_in_the_log(caplog):
    group = threads.ThreadGroup("group")
    group.start(lambda: fail(RuntimeError("broken")), "worker")
    group.join(harness.PATIENCE)
    assert "group/worker" in caplog.text
    assert "Traceback" in caplog.text
    assert "RuntimeError: broken" in caplog.text


def test_wait_says_whether_finish_was_called():
    group = threads.ThreadGroup("group")
    assert not group.wait(0)
    waiter = harness.Call(group.wait)
    group.finish()
    assert waiter.result()


def test_a_failure_wakes_who_waits():
    group = threads.ThreadGroup("group")
    waiter = harness.Call(group.wait)
    group.fail(OSError("from outside"))
    with pytest.raises(OSError, match="from outside"):
        waiter.result()


def test_join_names_a_thread_that_does_not_end():
    group = threads.ThreadGroup("group")
    release = threading.Event()
    group.start(lambda: release.wait(harness.PATIENCE) and None, "stuck")
    with pytest.raises(TimeoutError, match="group/stuck did not end within"):
        group.join(0.01)
    release.set()
    group.join(harness.PATIENCE)


def test_a_thread_of_the_group_may_join_the_others():
    group = threads.ThreadGroup("group")
    joined = threading.Event()

    def last():
        group.join(harness.PATIENCE)
        joined.set()

    group.start(lambda: None, "other")
    group.start(last, "last")
    assert joined.wait(harness.PATIENCE)
