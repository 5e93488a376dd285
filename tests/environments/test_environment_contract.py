"""What every environment must do, whatever its kind."""

import pickle

import dm_env
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from seedlib import specs
from seedlib.environments import load

STEPS = 300

MODULE = """
import gymnasium

def make(seed):
    return gymnasium.make("Blackjack-v1")
"""

# Name, options, and whether the seed changes what happens.
KINDS = [
    ("catch", {}, True),
    ("catch", {"rows": 4, "columns": 3}, True),
    ("synthetic:84x84x4", {}, True),
    ("synthetic:7", {"episode_length": 5, "num_actions": 2}, True),
    ("gymnasium:CartPole-v1", {}, True),
    ("gymnasium:Pendulum-v1", {"max_episode_steps": 20}, True),
    ("gymnasium:FrozenLake-v1", {}, True),
    ("atari:Pong", {"max_frames": 400}, True),
    ("atari:Breakout", {"sticky_actions": True, "stack": 1, "terminal_on_life_loss": True}, True),
    ("bsuite:memory_len/8", {}, True),
    ("bsuite:catch_noise/3", {}, True),
    ("bsuite:cartpole/0", {}, True),
    ("bsuite:cartpole_swingup/0", {}, True),
    ("bsuite:umbrella_distract/5", {}, True),
    ("bsuite:deep_sea/0", {}, False),
    ("bsuite:discounting_chain/0", {}, False),
    ("contract_module:make", {}, True),
]


@pytest.fixture(autouse=True)
def contract_module(tmp_path, monkeypatch):
    (tmp_path / "contract_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{len(kind[1])}")
def kind(request):
    return request.param


def sample(spec: dm_specs.Array, random: np.random.Generator) -> np.ndarray:
    """An action as an actor hands it over: an array of the canonical dtype."""
    if isinstance(spec, dm_specs.DiscreteArray):
        return np.asarray(random.integers(spec.num_values), spec.dtype)
    return random.uniform(spec.minimum, spec.maximum, spec.shape).astype(spec.dtype)


def play(environment: dm_env.Environment, steps: int) -> list[dm_env.TimeStep]:
    """Random steps from before the first reset; observations are copied."""
    random = np.random.default_rng(0)
    action_spec = specs.make_environment_spec(environment).actions
    time_steps = []
    for _ in range(steps):
        action = tree.map_structure(lambda spec: sample(spec, random), action_spec)
        time_step = environment.step(action)
        observation = tree.map_structure(np.array, time_step.observation)
        time_steps.append(time_step._replace(observation=observation))
    return time_steps


def flat(time_steps: list[dm_env.TimeStep]) -> list[bytes]:
    return [np.asarray(leaf, np.float64).tobytes() for leaf in tree.flatten(time_steps)]


def test_random_steps_follow_the_grammar_and_the_specs(kind):
    name, options, _ = kind
    environment = load(name, **options)(seed=0)
    observation_spec = environment.observation_spec()
    canonical = specs.make_environment_spec(environment)
    tree.assert_same_structure(observation_spec, canonical.observations)

    previous = dm_env.StepType.LAST  # Before the first step it is as after a LAST one.
    for time_step in play(environment, STEPS):
        assert (time_step.step_type == dm_env.StepType.FIRST) == (previous == dm_env.StepType.LAST)
        if time_step.first():
            assert time_step.reward is None and time_step.discount is None
        else:
            assert np.shape(time_step.reward) == () and np.isfinite(time_step.reward)
            assert time_step.discount in ({0.0, 1.0} if time_step.last() else {1.0})
        tree.map_structure(
            lambda spec, leaf: spec.validate(leaf), observation_spec, time_step.observation
        )
        previous = time_step.step_type
    environment.close()


def test_reset_in_the_middle_of_an_episode_begins_one(kind):
    name, options, _ = kind
    environment = load(name, **options)(seed=0)
    play(environment, 2)
    assert environment.reset().first()
    assert not environment.step(np.zeros(environment.action_spec().shape, np.int32)).first()
    environment.close()


def test_the_seed_decides_what_happens(kind):
    name, options, stochastic = kind
    factory = load(name, **options)
    traces = [flat(play(factory(seed), STEPS)) for seed in (1, 1, 2)]
    assert traces[0] == traces[1]
    assert (traces[0] != traces[2]) == stochastic


@pytest.mark.parametrize("name", ["catch", "gymnasium:CartPole-v1", "bsuite:memory_len/8"])
def test_the_first_episode_is_not_repeated(name):
    """The seed is for the first reset alone: every episode would otherwise be the same."""
    environment = load(name)(seed=3)
    beginnings = {tuple(flat([environment.reset()])) for _ in range(30)}
    assert len(beginnings) > 1


def test_factories_pickle(kind):
    name, options, _ = kind
    factory = load(name, **options)
    copy = pickle.loads(pickle.dumps(factory))
    assert copy == factory and hash(copy) == hash(factory)
    assert flat(play(copy(4), 20)) == flat(play(factory(4), 20))
