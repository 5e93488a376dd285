"""Catch, synthetic images and bsuite: what happens in them, step by step."""

import numpy as np
import pytest
from bsuite import sweep

from seedlib import specs
from seedlib.environments import load

LEFT, STAY, RIGHT = 0, 1, 2


def column(row: np.ndarray) -> int:
    (found,) = np.flatnonzero(row)
    return int(found)


def test_catch_board_at_the_start():
    board = load("catch")(0).reset().observation
    assert board.shape == (10, 5) and board.dtype == np.float32
    # Ball in the top row, paddle in the middle of the bottom one, nothing else.
    assert board.sum() == 2 and board[0].sum() == 1
    assert column(board[9]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_catch_pays_one_for_a_ball_that_is_caught(seed):
    environment = load("catch")(seed)
    time_step = environment.reset()
    ball = column(time_step.observation[0])
    steps, rewards = 0, []
    paddle = 2
    while not time_step.last():
        action = STAY if paddle == ball else (RIGHT if paddle < ball else LEFT)
        paddle += action - 1
        time_step = environment.step(np.int32(action))
        steps += 1
        rewards.append(time_step.reward)
        # The ball's row is the number of falls, and the paddle is where it was moved to.
        assert time_step.observation[steps, ball] == 1.0
        assert time_step.observation[9, paddle] == 1.0
    # Ten rows: nine falls from the top to the bottom. The paddle needs at most two of them.
    assert steps == 9
    assert rewards == [0.0] * 8 + [1.0]
    assert time_step.discount == 0.0
    # The ball lies on the paddle.
    assert time_step.observation.sum() == 1


def test_catch_pays_minus_one_for_a_ball_that_is_missed():
    environment = load("catch")(0)
    time_step = environment.reset()
    ball = column(time_step.observation[0])
    # Away from the ball and against the wall, which holds the paddle.
    away, wall = (RIGHT, 4) if ball < 2 else (LEFT, 0)
    while not time_step.last():
        time_step = environment.step(away)
    np.testing.assert_array_equal(np.flatnonzero(time_step.observation[9]), sorted([ball, wall]))
    assert time_step.reward == -1.0 and time_step.discount == 0.0


def test_catch_observations_are_not_written_to_later():
    environment = load("catch")(0)
    first = environment.reset().observation
    before = first.copy()
    environment.step(STAY)
    np.testing.assert_array_equal(first, before)


def test_catch_balls_come_everywhere():
    environment = load("catch")(0)
    assert {column(environment.reset().observation[0]) for _ in range(200)} == set(range(5))


def test_synthetic_episodes_have_their_length_and_rewards():
    environment = load("synthetic:2x3x1", episode_length=20)(0)
    time_steps = [environment.step(0) for _ in range(22)]
    assert [step.step_type for step in time_steps] == [0] + [1] * 19 + [2] + [0]
    # One of ten transitions pays: the tenth and the twentieth.
    assert [step.reward for step in time_steps[1:21]] == ([0.0] * 9 + [1.0]) * 2
    assert time_steps[20].discount == 0.0
    assert time_steps[0].observation.shape == (2, 3, 1)
    assert any((time_steps[0].observation != step.observation).any() for step in time_steps[1:10])


def test_synthetic_episodes_are_a_thousand_steps_long():
    environment = load("synthetic:1")(0)
    lasts = [index for index in range(2003) if environment.step(0).last()]
    # Steps 0 to 1000 are FIRST and a thousand transitions; 1001 is the next FIRST.
    assert lasts == [1000, 2001]


def test_memory_length_pays_for_the_remembered_bit():
    # Setting 8 has length 9 (settings 0 to 9 are lengths 1 to 10). The first observation shows the
    # bit as -1 or 1; the action after `length` more steps must be 0 or 1 like it.
    environment = load("bsuite:memory_len/8")(seed=1)
    returns, bits = [], []
    for _ in range(20):
        time_step = environment.reset()
        bit = int(time_step.observation[0, 2] > 0)
        steps = 0
        while not time_step.last():
            time_step = environment.step(np.int32(bit))
            steps += 1
        returns.append(time_step.reward)
        bits.append(bit)
    assert steps == 10
    assert returns == [1.0] * 20
    assert set(bits) == {0, 1}


def bsuite_families() -> list[str]:
    """Every experiment once; those on MNIST fetch a data set and are left out."""
    families = dict.fromkeys(name.partition("/")[0] for name in sweep.SWEEP)
    return [family for family in families if not family.startswith("mnist")]


@pytest.mark.parametrize("family", bsuite_families())
def test_every_bsuite_family_can_be_stepped(family):
    """Also where bsuite's own action spec needs a NumPy that is long gone."""
    environment = load(f"bsuite:{family}/0")(0)
    spec = specs.make_environment_spec(environment)
    assert environment.reset().first()
    for action in range(spec.actions.num_values):
        time_step = environment.step(np.int32(action))
        assert time_step.observation.shape == spec.observations.shape


def test_bsuite_prints_nothing(capsys):
    load("bsuite:catch/0")(0).reset()
    assert capsys.readouterr().out == ""
