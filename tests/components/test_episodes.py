"""Tests of episode returns: what is reported, what is not, and under whose name."""

import numpy as np

from seedlib.components import episodes
from tests.components.harness import FIRST, LAST, MID

EPISODE = [FIRST, *[MID] * 9, LAST]  # Ten transitions.


def run(tracker, slot, step_types, rewards=None, environment_id=7, evaluate=False):
    """Feeds one environment; returns `(environment id, return, length, evaluate)` of its ends."""
    found = []
    for number, step_type in enumerate(step_types):
        # A FIRST step has no reward; the tracker must not count what it shows there.
        reward = 1.0 if rewards is None else rewards[number]
        ended = tracker.append(
            np.array([slot]),
            np.array([step_type], np.uint8),
            np.array([reward], np.float32),
            np.array([environment_id], np.int32),
            np.array([evaluate]),
        )
        if ended is not None:
            found += zip(*(field.tolist() for field in ended), strict=True)
    return found


def test_the_return_is_the_sum_of_rewards_whether_terminated_or_truncated():
    # The tracker is not told the discount, which alone tells the two apart.
    tracker = episodes.EpisodeTracker(1)
    assert run(tracker, 0, EPISODE * 6) == [(7, 10.0, 10, False)] * 6


def test_truncated_and_terminated_episodes_in_turn_of_several_environments():
    tracker = episodes.EpisodeTracker(3)
    slots = np.array([2, 0, 1])
    ends = []
    for step_type in EPISODE * 4:
        ended = tracker.append(
            slots,
            np.full(3, step_type, np.uint8),
            np.array([1.0, 2.0, -1.0], np.float32),
            np.array([12, 10, 11], np.int32),
            np.zeros(3, np.bool_),
        )
        if ended is not None:
            ends.append((ended.environment_id.tolist(), ended.returns.tolist()))
    assert ends == [([12, 10, 11], [10.0, 20.0, -10.0])] * 4


def test_an_episode_that_was_joined_in_the_middle_is_not_reported():
    tracker = episodes.EpisodeTracker(1)
    assert run(tracker, 0, [MID, MID, LAST]) == []
    assert run(tracker, 0, [LAST]) == []
    assert run(tracker, 0, [*EPISODE, MID, LAST]) == [(7, 10.0, 10, False)]


def test_an_episode_that_broke_off_is_not_reported_and_adds_nothing_to_the_next():
    tracker = episodes.EpisodeTracker(1)
    assert run(tracker, 0, [FIRST, MID, MID, *EPISODE]) == [(7, 10.0, 10, False)]


def test_reset_forgets_the_episode_under_way_in_its_slot_alone():
    tracker = episodes.EpisodeTracker(2)
    for slot in (0, 1):
        assert run(tracker, slot, EPISODE[:6]) == []
    tracker.reset(np.array([0]))
    assert run(tracker, 0, EPISODE[6:]) == []
    assert run(tracker, 1, EPISODE[6:]) == [(7, 10.0, 10, False)]


def test_evaluation_is_reported_apart():
    tracker = episodes.EpisodeTracker(2)
    assert run(tracker, 0, EPISODE, evaluate=True) == [(7, 10.0, 10, True)]
    assert run(tracker, 1, EPISODE, environment_id=3) == [(3, 10.0, 10, False)]


def test_returns_are_summed_in_64_bit():
    # In float32, 2^24 + 1 is 2^24.
    tracker = episodes.EpisodeTracker(1)
    rewards = [0.0, 2.0**24, 1.0, 1.0]
    assert run(tracker, 0, [FIRST, MID, MID, LAST], rewards) == [(7, 2.0**24 + 2, 3, False)]


def test_what_was_reported_does_not_change_later():
    tracker = episodes.EpisodeTracker(1)
    identity = np.array([7], np.int32)
    ended = None
    for step_type in EPISODE:
        ended = tracker.append(
            np.array([0]),
            np.array([step_type], np.uint8),
            np.ones(1, np.float32),
            identity,
            np.array([False]),
        )
    identity[:] = 99
    run(tracker, 0, EPISODE)
    assert (ended.environment_id.tolist(), ended.returns.tolist()) == ([7], [10.0])
