"""The Gymnasium adapter: ends of episodes, spaces, rewards, old interfaces."""

import collections
import importlib

import gymnasium
import numpy as np
import pytest
import tree
from gymnasium import spaces

from seedlib import specs
from seedlib.environments import UnsupportedEnvironmentError, load
from seedlib.environments.gymnasium_adapter import GymnasiumEnvironment

BOX = spaces.Box(0.0, 1000.0, (), np.float32)
TWO = spaces.Discrete(2)


class Scripted(gymnasium.Env):
    """Returns what it is told, and remembers what it is given."""

    def __init__(self, observation_space=BOX, action_space=TWO, observation=None, reward=1.0):
        self.observation_space = observation_space
        self.action_space = action_space
        self.observation = np.float32(0) if observation is None else observation
        self.reward = reward
        self.ending = (False, False)
        self.actions, self.seeds, self.closed = [], [], False

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return self.observation, {}

    def step(self, action):
        self.actions.append(action)
        return self.observation, self.reward, *self.ending, {}

    def close(self):
        self.closed = True


class Counter(gymnasium.Env):
    """Observes the number of steps, and 999 where its limit of five truncates."""

    observation_space, action_space = BOX, TWO

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.float32(0), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == 5
        return np.float32(999 if ended else self.steps), 1.0, False, ended, {}


def test_the_last_step_carries_the_final_observation():
    environment = GymnasiumEnvironment(Counter(), seed=0)
    assert environment.step(0).observation == 0  # The first step resets.
    time_steps = [environment.step(0) for _ in range(6)]
    assert [float(step.observation) for step in time_steps] == [1, 2, 3, 4, 999, 0]
    last, following = time_steps[4], time_steps[5]
    assert last.last() and last.discount == 1.0 and last.reward == 1.0
    assert following.first() and following.reward is None and following.discount is None


@pytest.mark.parametrize(
    ("terminated", "truncated", "discount"),
    [(True, False, 0.0), (False, True, 1.0), (True, True, 0.0)],
)
@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_the_discount_tells_termination_from_truncation(terminated, truncated, discount, kind):
    inner = Scripted()
    environment = GymnasiumEnvironment(inner, seed=0)
    environment.reset()
    middle = environment.step(0)
    assert middle.mid() and middle.discount == 1.0
    inner.ending = (kind(terminated), kind(truncated))
    last = environment.step(0)
    assert last.last() and last.discount == discount
    assert environment.step(1).first()
    assert len(inner.actions) == 2, "the action after a LAST step does not reach the environment"


def test_only_the_first_reset_is_seeded():
    inner = Scripted()
    environment = GymnasiumEnvironment(inner, seed=7)
    for _ in range(3):
        environment.reset()
    assert inner.seeds == [7, None, None]


def test_close_reaches_the_environment():
    inner = Scripted()
    GymnasiumEnvironment(inner, seed=0).close()
    assert inner.closed


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (3, 3.0),
        (2.5, 2.5),
        (np.float64(2.5), 2.5),
        (np.float32(2.5), 2.5),
        (np.int64(-4), -4.0),
        (np.array(1.5), 1.5),
        (np.array([1.5]), 1.5),
        (np.array([2], np.int32), 2.0),
        (True, 1.0),
        (np.bool_(False), 0.0),
    ],
)
def test_a_reward_of_any_scalar_type_becomes_a_float(reward, value):
    environment = GymnasiumEnvironment(Scripted(reward=reward), seed=0)
    environment.reset()
    found = environment.step(0).reward
    assert type(found) is float and found == value


@pytest.mark.parametrize("reward", [np.zeros(2), [1.0, 2.0], np.zeros((1, 1)), None, "1"])
def test_a_reward_that_is_not_one_number_is_refused(reward):
    environment = GymnasiumEnvironment(Scripted(reward=reward), seed=0)
    environment.reset()
    shape = str(np.shape(reward)).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(UnsupportedEnvironmentError, match=f"Scripted: .*shape {shape}"):
        environment.step(0)


def play_actions(space, actions):
    """What reaches an environment with `space` of these actions of an agent."""
    inner = Scripted(action_space=space)
    environment = GymnasiumEnvironment(inner, seed=0)
    environment.reset()
    for action in actions:
        environment.step(action)
    return environment.action_spec(), inner.actions


def test_discrete_actions_count_from_the_start_of_the_space():
    space = spaces.Discrete(4, start=-7)
    spec, seen = play_actions(space, np.arange(4, dtype=np.int32))
    assert spec.num_values == 4 and spec.minimum == 0
    assert seen == [-7, -6, -5, -4]
    assert all(space.contains(action) for action in seen)


def test_a_single_discrete_action_with_a_start():
    spec, seen = play_actions(spaces.Discrete(1, start=6), [np.int32(0), np.array(0)])
    assert spec.num_values == 1
    assert seen == [6, 6]


def test_multi_discrete_actions_have_a_start_for_each_part():
    space = spaces.MultiDiscrete([3, 2, 4], start=[-1, 10, 0])
    spec, seen = play_actions(space, [np.array([0, 0, 0]), np.array([2, 1, 3], np.int32)])
    assert spec.shape == (3,)
    np.testing.assert_array_equal(spec.minimum, [0, 0, 0])
    np.testing.assert_array_equal(spec.maximum, [2, 1, 3])
    np.testing.assert_array_equal(seen, [[-1, 10, 0], [1, 11, 3]])
    assert all(space.contains(action) for action in seen)


def test_box_actions_are_the_environments_own_arrays():
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    buffer = np.array([0.5, -0.5], np.float32)
    spec, seen = play_actions(space, [buffer])
    buffer[:] = 0.0
    np.testing.assert_array_equal(seen[0], [0.5, -0.5])
    assert seen[0].dtype == np.float32
    assert spec.minimum == -1.0 and spec.maximum == 1.0 and spec.shape == (2,)


def test_float64_bounds_hold_for_actions_in_float32():
    # float32(0.1) = 0.100000001490..., which is beyond a float64 bound of 0.1.
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)
    _, seen = play_actions(space, [np.array([0.1], np.float32), np.array([-0.1], np.float32)])
    assert all(space.contains(action) for action in seen)


def test_nested_actions():
    space = spaces.Dict(
        arm=spaces.Tuple([spaces.Discrete(2, start=5), spaces.Box(0.0, 1.0, (1,), np.float32)]),
        leg=spaces.MultiBinary(3),
    )
    action = {
        "arm": (np.int32(1), np.array([0.25], np.float32)),
        "leg": np.array([1, 0, 1], np.int32),
    }
    spec, seen = play_actions(space, [action])
    assert type(spec) is dict and type(spec["arm"]) is tuple
    assert seen[0]["arm"][0] == 6
    assert space.contains(seen[0])


OBSERVATIONS = {
    "box": (spaces.Box(0, 255, (2, 2), np.uint8), np.ones((2, 2), np.uint8)),
    "scalar box": (BOX, np.float32(3)),
    "unbounded": (spaces.Box(-np.inf, np.inf, (3,), np.float64), np.ones(3)),
    "discrete": (spaces.Discrete(3), 2),
    "discrete with start": (spaces.Discrete(3, start=-1), np.int64(-1)),
    "multi discrete": (spaces.MultiDiscrete([2, 3], start=[0, 4]), np.array([1, 6])),
    "multi binary": (spaces.MultiBinary([2, 2]), np.ones((2, 2), np.int8)),
    "dict of tuple": (
        spaces.Dict(hands=spaces.Tuple([BOX, spaces.Discrete(2)]), eye=BOX),
        {"eye": np.float32(1), "hands": (np.float32(2), 1)},
    ),
    "tuple of dict": (
        spaces.Tuple([spaces.Dict(a=TWO), spaces.Tuple([BOX])]),
        ({"a": 1}, (np.float32(2),)),
    ),
}


@pytest.mark.parametrize("case", OBSERVATIONS)
def test_observations_fit_their_specs(case):
    space, observation = OBSERVATIONS[case]
    environment = GymnasiumEnvironment(Scripted(space, observation=observation), seed=0)
    spec = environment.observation_spec()
    specs.make_environment_spec(environment)
    for time_step in (environment.reset(), environment.step(0), environment.step(0)):
        tree.assert_same_structure(spec, time_step.observation)
        tree.map_structure(lambda s, leaf: s.validate(leaf), spec, time_step.observation)
        tree.map_structure(np.testing.assert_array_equal, time_step.observation, observation)


def test_dict_and_tuple_observations_become_plain_ones():
    space, observation = OBSERVATIONS["dict of tuple"]
    ordered = collections.OrderedDict(hands=list(observation["hands"]), eye=observation["eye"])
    environment = GymnasiumEnvironment(Scripted(space, observation=ordered), seed=0)
    for time_step in (environment.reset(), environment.step(0), environment.step(0)):
        assert type(time_step.observation) is dict
        assert type(time_step.observation["hands"]) is tuple


def test_specs_keep_shapes_dtypes_and_bounds():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4), np.uint8),
        place=spaces.Box(np.array([-1, -2]), np.array([1, 2]), dtype=np.float64),
        count=spaces.Discrete(5),
        shifted=spaces.Discrete(5, start=3),
    )
    observation = {"image": np.zeros((4, 4), np.uint8), "place": np.zeros(2)}
    observation |= {"count": 0, "shifted": 3}
    inner = Scripted(space, observation=observation)
    spec = GymnasiumEnvironment(inner, seed=0).observation_spec()
    assert spec["image"].dtype == np.uint8 and spec["image"].maximum == 255
    assert np.shape(spec["image"].maximum) == (), "one number, not a picture of 255s"
    np.testing.assert_array_equal(spec["place"].minimum, [-1, -2])
    assert spec["place"].dtype == np.float64
    assert spec["count"].num_values == 5
    assert (spec["shifted"].minimum, spec["shifted"].maximum) == (3, 7)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (spaces.Text(5), "observation: Text"),
        (spaces.Dict(a=BOX, b=spaces.Text(5)), "observation/b: Text"),
        (spaces.Dict(a=spaces.Tuple([BOX, spaces.Text(5)])), "observation/a/1: Text"),
        (spaces.Tuple([spaces.Sequence(BOX)]), "observation/0: Sequence"),
        (spaces.Graph(BOX, None), "observation: Graph"),
        (object(), "observation: object"),
    ],
)
def test_a_space_without_numbers_is_refused_by_its_path(space, says):
    with pytest.raises(UnsupportedEnvironmentError, match=f"Scripted: {says}"):
        GymnasiumEnvironment(Scripted(space), seed=0)


def test_an_action_space_without_numbers_is_refused_by_its_path():
    space = spaces.Dict(say=spaces.Text(3))
    with pytest.raises(UnsupportedEnvironmentError, match="action/say: Text"):
        GymnasiumEnvironment(Scripted(action_space=space), seed=0)


@pytest.mark.parametrize(
    ("space", "observation", "says"),
    [
        (BOX, np.zeros(2, np.float32), r"observation: .* float32 \(\), .* float32 \(2,\)"),
        (BOX, "text", "observation: .*<U4"),
        (spaces.Discrete(3), 0.5, "observation: .*int64.*float64"),
        (spaces.Dict(a=BOX), {"b": 1.0}, "observation: .*'a'.*'b'"),
        (spaces.Dict(a=BOX), np.float32(1), "observation: .*'a'.*float32"),
        (spaces.Tuple([BOX, BOX]), (1.0,), "observation: .*tuple of 2"),
        (spaces.Dict(a=spaces.Tuple([BOX])), {"a": (np.zeros(3),)}, r"observation/a/0: .*\(3,\)"),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_refused(space, observation, says):
    environment = GymnasiumEnvironment(Scripted(space, observation=observation), seed=0)
    with pytest.raises(UnsupportedEnvironmentError, match=f"Scripted: {says}"):
        environment.reset()


def test_a_first_step_that_does_not_fit_its_space_is_refused():
    inner = Scripted()
    environment = GymnasiumEnvironment(inner, seed=0)
    environment.reset()
    inner.observation = np.zeros(3)
    with pytest.raises(UnsupportedEnvironmentError, match="observation"):
        environment.step(0)


class Old:
    """An environment from before Gymnasium: no info at reset, four values per step."""

    observation_space, action_space = BOX, TWO

    def __init__(self):
        self.seeds = []
        self.result = (np.float32(1), 1.0, False, {})

    def seed(self, seed=None):
        self.seeds.append(seed)

    def reset(self):
        return np.float32(0)

    def step(self, action):
        return self.result


@pytest.mark.parametrize(
    ("info", "discount"),
    [
        ({}, 0.0),
        (None, 0.0),
        ({"TimeLimit.truncated": False}, 0.0),
        ({"TimeLimit.truncated": True}, 1.0),
    ],
)
def test_an_environment_of_the_old_interface_is_adapted(info, discount):
    inner = Old()
    environment = GymnasiumEnvironment(inner, seed=9)
    assert environment.reset().first()
    assert environment.step(0).mid()
    inner.result = (np.float32(5), 2.0, True, info)
    last = environment.step(0)
    assert last.last() and last.discount == discount and last.reward == 2.0
    assert environment.step(0).first()
    assert inner.seeds == [9]


def test_spaces_of_the_older_package_are_adapted():
    gym = importlib.import_module("gym")  # bsuite depends on it.
    inner = Old()
    inner.observation_space = gym.spaces.Dict(a=gym.spaces.Box(0.0, 9.0, (2,), np.float32))
    inner.action_space = gym.spaces.Discrete(3, start=2)
    inner.reset = lambda: {"a": np.zeros(2, np.float32)}
    inner.step = lambda action: ({"a": np.full(2, action, np.float32)}, 0.0, False, {})
    environment = GymnasiumEnvironment(inner, seed=0)
    environment.reset()
    assert environment.action_spec().num_values == 3
    np.testing.assert_array_equal(environment.step(np.int32(1)).observation["a"], [3, 3])


def test_a_step_of_three_values_is_refused_by_name():
    inner = Old()
    inner.result = (np.float32(1), 1.0, False)
    environment = GymnasiumEnvironment(inner, seed=0)
    environment.reset()
    with pytest.raises(UnsupportedEnvironmentError, match=r"Old: step must return 5.*got 3"):
        environment.step(0)


def test_several_agents_are_refused_in_one_line():
    class Parallel:
        possible_agents = ("first", "second")

        def reset(self, seed=None, options=None):
            return {}, {}

        def step(self, actions):
            return {}, {}, {}, {}, {}

    with pytest.raises(UnsupportedEnvironmentError, match=r"Parallel.*several agents") as error:
        GymnasiumEnvironment(Parallel(), seed=0)
    assert "\n" not in str(error.value)


def test_a_vector_of_environments_is_refused():
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(UnsupportedEnvironmentError, match="vector of environments"):
        GymnasiumEnvironment(vector, seed=0)


def test_cartpole_pays_one_for_each_step():
    environment = load("gymnasium:CartPole-v1")(0)
    random = np.random.default_rng(0)
    for _ in range(20):
        assert environment.reset().first()
        length, total, time_step = 0, 0.0, None
        while time_step is None or not time_step.last():
            time_step = environment.step(np.int32(random.integers(2)))
            length += 1
            total += time_step.reward
        assert total == length


def test_the_registered_time_limit_truncates():
    # Pendulum never terminates; its registered limit is 200 steps.
    environment = load("gymnasium:Pendulum-v1")(0)
    time_step, steps = environment.reset(), 0
    while not time_step.last():
        time_step = environment.step(np.zeros(1, np.float32))
        steps += 1
    assert steps == 200 and time_step.discount == 1.0


def test_the_trace_is_that_of_the_environment_itself():
    reference = gymnasium.make("CartPole-v1")
    environment = load("gymnasium:CartPole-v1")(5)
    expected, _ = reference.reset(seed=5)
    np.testing.assert_array_equal(environment.reset().observation, expected)
    random = np.random.default_rng(1)
    for _ in range(500):
        action = int(random.integers(2))
        expected, reward, terminated, truncated, _ = reference.step(action)
        time_step = environment.step(action)
        np.testing.assert_array_equal(time_step.observation, expected)
        assert time_step.reward == reward
        assert time_step.last() == (terminated or truncated)
        if time_step.last():
            expected, _ = reference.reset()
            np.testing.assert_array_equal(environment.step(0).observation, expected)
