"""Atari: games, preprocessing, frame limits."""

import cv2
import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing

from seedlib import specs
from seedlib.environments import atari, load

FIRE, RIGHT = 1, 2  # In the smallest action sets of Breakout and Space Invaders.


def episode_length(environment, action=0) -> tuple[int, float]:
    """Transitions of one episode, and the discount that ends it."""
    time_step = environment.reset()
    steps = 0
    while not time_step.last():
        time_step = environment.step(action)
        steps += 1
    return steps, time_step.discount


def test_there_are_57_games():
    assert len(set(atari.GAMES)) == len(atari.GAMES) == 57


def test_all_games_load():
    for game in atari.GAMES:
        environment = load(f"atari:{game}", noop_max=0)(seed=0)
        spec = specs.make_environment_spec(environment)
        assert spec.observations.shape == (84, 84, 4)
        assert environment.reset().observation.dtype == np.uint8
        assert environment.step(spec.actions.num_values - 1).observation.shape == (84, 84, 4)


def test_a_game_outside_the_57_loads():
    assert load("atari:TicTacToe3D")(0).reset().first()


@pytest.mark.parametrize(("max_frames", "steps"), [(20, 5), (18, 5), (17, 5), (16, 4), (1, 1)])
def test_the_frame_limit_truncates_after_whole_steps(max_frames, steps):
    # Four frames a step: 20 frames are 5 steps; 18 and 17 are reached within the fifth, which is
    # not cut short.
    environment = load("atari:Pong", max_frames=max_frames)(0)
    assert episode_length(environment) == (steps, 1.0)
    assert episode_length(environment) == (steps, 1.0), "and counts anew in the next episode"


def test_the_frame_limit_counts_frames_whatever_the_skip():
    assert episode_length(load("atari:Pong", max_frames=20, frame_skip=1)(0)) == (20, 1.0)
    assert episode_length(load("atari:Pong", max_frames=20, frame_skip=10)(0)) == (2, 1.0)


def test_a_lost_game_is_a_termination():
    # Standing still loses Pong 0 to 21.
    environment = load("atari:Pong")(0)
    time_step, total = environment.reset(), 0.0
    while not time_step.last():
        time_step = environment.step(0)
        total += time_step.reward or 0.0
    assert total == -21.0
    assert time_step.discount == 0.0
    assert environment.step(0).first()


@pytest.mark.parametrize("game", ["Pong", "Breakout", "SpaceInvaders"])
def test_frames_and_rewards_are_those_of_gymnasiums_preprocessing(game):
    """Gymnasium's wrapper is another implementation of the same pipeline."""
    reference = AtariPreprocessing(
        gymnasium.make(
            f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, disable_env_checker=True
        ),
        noop_max=0,
    )
    environment = load(f"atari:{game}", noop_max=0)(0)
    expected, _ = reference.reset(seed=0)
    observation = environment.reset().observation
    for channel in range(4):  # At the start, the first image four times.
        np.testing.assert_array_equal(observation[..., channel], expected)
    history = [expected] * 4
    random = np.random.default_rng(0)
    rewards = 0.0
    for _ in range(150):
        action = int(random.integers(environment.action_spec().num_values))
        expected, reward, terminated, _, _ = reference.step(action)
        assert not terminated
        history = [*history[1:], expected]
        time_step = environment.step(action)
        assert time_step.reward == reward
        # Oldest first, newest last.
        np.testing.assert_array_equal(time_step.observation, np.stack(history, axis=-1))
        rewards += reward
    assert rewards != 0


def test_a_single_frame_is_the_newest_of_a_stack():
    single = load("atari:Pong", stack=1)(3)
    stacked = load("atari:Pong", stack=4)(3)
    for _ in range(20):
        one, four = single.step(2).observation, stacked.step(2).observation
        assert one.shape == (84, 84, 1)
        np.testing.assert_array_equal(one[..., 0], four[..., 3])


def test_more_than_four_frames_can_be_stacked():
    environment = load("atari:Pong", stack=6)(0)
    environment.reset()
    first = environment.step(0).observation
    second = environment.step(0).observation
    assert second.shape == (84, 84, 6)
    np.testing.assert_array_equal(second[..., :5], first[..., 1:])


def test_observations_are_not_written_to_later():
    environment = load("atari:Pong", stack=1)(0)
    kept = [environment.step(2).observation for _ in range(10)]
    copies = [observation.copy() for observation in kept]
    for _ in range(10):
        environment.step(3)
    for observation, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(observation, copy)


def test_the_image_is_the_maximum_of_the_last_two_frames():
    # The same game frame by frame: no pooling with a skip of one, so take both frames as they
    # come, full size, and pool them here.
    import ale_py
    from ale_py import roms

    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path("space_invaders"))
    ale.reset_game()
    environment = load("atari:SpaceInvaders", noop_max=0, stack=1)(0)
    environment.reset()
    differed = False
    for _ in range(40):
        frames = []
        for _ in range(4):
            ale.act(FIRE)
            frames.append(ale.getScreenGrayscale())
        pooled = np.maximum(frames[2], frames[3])
        differed |= bool((pooled != frames[3]).any())
        expected = cv2.resize(pooled, (84, 84), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(environment.step(FIRE).observation[..., 0], expected)
    assert differed, "pooling must have mattered"


def test_action_sets():
    assert load("atari:Pong")(0).action_spec().num_values == 6
    assert load("atari:Pong", full_action_set=True)(0).action_spec().num_values == 18


def test_sticky_actions_depend_on_the_seed():
    def trace(sticky: bool, seed: int) -> list[bytes]:
        environment = load("atari:Pong", sticky_actions=sticky, noop_max=0)(seed)
        return [environment.step(2 + index // 7 % 2).observation.tobytes() for index in range(80)]

    # Without random beginnings the seed can only act through sticky actions.
    assert trace(False, 1) == trace(False, 2)
    assert trace(True, 1) == trace(True, 1)
    assert trace(True, 1) != trace(True, 2)
    assert trace(True, 1) != trace(False, 1)


def test_a_lost_life_ends_an_episode_but_not_the_game():
    # Breakout has five lives; firing at once and standing still loses them one by one.
    environment = load("atari:Breakout", terminal_on_life_loss=True, noop_max=0)(0)
    whole_game = load("atari:Breakout", noop_max=0)(0)
    episodes, total = 0, 0
    for _ in range(5):
        steps, discount = episode_length(environment, FIRE)
        episodes += discount == 0.0
        total += steps
    assert episodes == 5
    whole, discount = episode_length(whole_game, FIRE)
    # A step that loses a life ends at once, so the games may differ by some frames.
    assert discount == 0.0 and abs(whole - total) < 10


def test_a_reset_in_the_middle_of_an_episode_begins_a_new_game():
    environment = load("atari:Breakout", terminal_on_life_loss=True, noop_max=0)(0)
    first = environment.reset().observation
    time_step = environment.step(FIRE)
    while not time_step.last():
        time_step = environment.step(RIGHT)
    goes_on = environment.reset().observation
    assert (goes_on != first).any(), "the paddle is where it was when the life was lost"
    environment.step(FIRE)
    np.testing.assert_array_equal(environment.reset().observation, first)
