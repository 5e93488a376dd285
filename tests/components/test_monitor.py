"""A run's counters are exact, whoever counts; they go on over a restart, and end with the run."""

import json
import math

import numpy as np
import pytest

from seedlib.components import episodes as episodes_lib
from seedlib.components import monitor
from tests.components import learning


def make_episodes(returns, lengths=None, evaluate=False):
    count = len(returns)
    return episodes_lib.Episodes(
        environment_id=np.zeros(count, np.int32),
        returns=np.array(returns, np.float64),
        lengths=np.array(range(count) if lengths is None else lengths, np.int64),
        evaluate=np.broadcast_to(np.array(evaluate, np.bool_), count),
    )


def test_nothing_is_known_before_the_first_episode():
    figures = monitor.RunMonitor().figures()
    for name in ("agent_steps", "environment_frames", "episodes", "evaluation_episodes"):
        assert figures[name] == 0
    for name in (
        "return_mean_100",
        "episode_length_mean_100",
        "evaluation_return_mean_100",
    ):
        assert figures[name] is None
    assert figures["steps_per_second"] == 0.0


@pytest.mark.parametrize("repeat", [1, 4])
def test_frames_are_steps_times_the_action_repeat(repeat):
    one = monitor.RunMonitor(action_repeat=repeat)
    for steps in (3, 0, 2**40 + 1):
        one.observe(steps, None)
    assert one.figures()["agent_steps"] == 2**40 + 4
    assert one.figures()["environment_frames"] == repeat * (2**40 + 4)


def test_means_are_over_the_last_hundred_episodes():
    one = monitor.RunMonitor()
    one.observe(1, make_episodes([1e9] * 30, [10**9] * 30))
    one.observe(1, make_episodes(range(90), range(90)))
    # Of 120 episodes the last hundred: ten of 1e9, and 0 .. 89, whose sum is 89 * 90 / 2 = 4005.
    figures = one.figures()
    assert figures["episodes"] == 120
    assert figures["return_mean_100"] == (10 * 1e9 + 4005) / 100
    assert figures["episode_length_mean_100"] == (10 * 10**9 + 4005) / 100
    one.observe(1, make_episodes(range(150)))
    # The last hundred of them: 50 .. 149.
    assert one.figures()["return_mean_100"] == 99.5


def test_evaluation_is_counted_apart():
    one = monitor.RunMonitor()
    one.observe(5, make_episodes([1, 2, 3, 4], evaluate=[False, True, False, True]))
    one.observe(0, make_episodes([10], evaluate=True))
    figures = one.figures()
    assert (figures["episodes"], figures["evaluation_episodes"]) == (2, 3)
    assert figures["return_mean_100"] == 2.0
    assert figures["evaluation_return_mean_100"] == (2 + 4 + 10) / 3
    # Episodes 0 and 2 had the lengths 0 and 2.
    assert figures["episode_length_mean_100"] == 1.0
    assert figures["agent_steps"] == 5


def test_the_run_is_over_once_its_steps_are_reached():
    one = monitor.RunMonitor(num_steps=10)
    one.observe(9, None)
    assert not one.done
    one.observe(4, make_episodes([1.0]))
    assert one.done
    before = one.figures()
    assert (before["agent_steps"], before["episodes"]) == (13, 1)
    # What comes after the end is not counted.
    one.observe(100, make_episodes([50.0]))
    after = one.figures()
    for name in ("agent_steps", "environment_frames", "episodes", "return_mean_100"):
        assert after[name] == before[name]


def test_nothing_is_counted_once_the_counting_is_finished():
    one = monitor.RunMonitor()
    one.observe(3, make_episodes([1.0]))
    one.finish()
    one.observe(4, make_episodes([2.0]))
    assert (one.figures()["agent_steps"], one.figures()["episodes"]) == (3, 1)
    assert not one.done


def test_a_run_without_a_limit_is_never_over():
    one = monitor.RunMonitor()
    one.observe(10**12, None)
    assert not one.done


def test_threads_count_exactly():
    one = monitor.RunMonitor(action_repeat=4)
    pair = make_episodes([1.0, 3.0], [5, 7], evaluate=[False, True])

    def observe():
        for _ in range(1000):
            one.observe(3, pair)

    calls = [learning.Call(observe) for _ in range(8)]
    while any(call.running for call in calls):
        # A reader never sees the one without the other.
        figures = one.figures()
        assert figures["agent_steps"] == 3 * figures["episodes"]
        assert figures["episodes"] == figures["evaluation_episodes"]
    for call in calls:
        call.result()
    figures = one.figures()
    assert figures["agent_steps"] == 8 * 1000 * 3
    assert figures["environment_frames"] == 8 * 1000 * 3 * 4
    assert (figures["episodes"], figures["evaluation_episodes"]) == (8000, 8000)
    assert (figures["return_mean_100"], figures["evaluation_return_mean_100"]) == (1.0, 3.0)


def test_threads_stop_counting_at_the_same_moment():
    one = monitor.RunMonitor(num_steps=1000)

    def observe():
        for _ in range(1000):
            one.observe(3, None)

    for call in [learning.Call(observe) for _ in range(4)]:
        call.result()
    # 333 times three is one too few, so 334 times.
    assert one.figures()["agent_steps"] == 1002


def test_a_restored_monitor_goes_on():
    one = monitor.RunMonitor(num_steps=100, action_repeat=2)
    one.observe(2**53 + 1 - 2**53, make_episodes([1.0, 2.0], evaluate=[False, True]))
    one.observe(40, make_episodes([5.0]))
    saved = json.loads(json.dumps(one.save()))

    other = monitor.RunMonitor(num_steps=100, action_repeat=2)
    other.restore(saved)
    other.start_clock()
    figures = other.figures()
    assert (figures["agent_steps"], figures["environment_frames"]) == (41, 82)
    assert (figures["episodes"], figures["evaluation_episodes"]) == (2, 1)
    assert figures["return_mean_100"] == 3.0
    assert figures["steps_per_second"] == 0.0
    assert figures["wall_seconds"] >= saved["wall_seconds"]
    other.observe(58, make_episodes([6.0]))
    assert not other.done
    assert other.figures()["return_mean_100"] == 4.0
    other.observe(1, None)
    assert other.done
    # The first monitor did not move with it.
    assert one.figures()["agent_steps"] == 41


def test_the_rate_is_of_the_time_since_the_restart():
    one = monitor.RunMonitor()
    one.restore(
        {
            "counts": {"agent_steps": 10**9},
            "wall_seconds": 5000.0,
            "returns": [],
            "lengths": [],
            "evaluation_returns": [],
        }
    )
    one.start_clock()
    one.observe(30, None)
    figures = one.figures()
    elapsed = figures["wall_seconds"] - 5000.0
    assert math.isclose(figures["steps_per_second"] * elapsed, 30, rel_tol=1e-6)


def test_large_counters_are_exact_over_a_restore():
    one = monitor.RunMonitor(action_repeat=4)
    one.observe(2**53, None)
    one.observe(1, None)
    other = monitor.RunMonitor(action_repeat=4)
    other.restore(json.loads(json.dumps(one.save())))
    other.observe(1, None)
    assert other.figures()["agent_steps"] == 2**53 + 2
    assert other.figures()["environment_frames"] == 4 * (2**53 + 2)


def test_a_run_that_is_restored_at_its_end_is_over():
    one = monitor.RunMonitor(num_steps=10)
    one.observe(12, None)
    other = monitor.RunMonitor(num_steps=10)
    other.restore(one.save())
    assert other.done
    longer = monitor.RunMonitor(num_steps=20)
    longer.restore(one.save())
    assert not longer.done
