"""Tests of the environment actor: real environments, and a real inference server behind it."""

import threading

import dm_env
import gymnasium
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from seedlib import environments, specs
from seedlib.agents import agent as agent_lib
from seedlib.components import actor as actor_lib
from seedlib.components.transport import client, server, service
from seedlib.environments import gymnasium_adapter
from tests.components import harness
from tests.components.harness import FIRST, LAST, MID


def counting(spec, length=1, **kwargs):
    return harness.counting_agent(spec, agent_lib.UnrollShape(length), **kwargs)


def serial(factory, ids=(0,), **kwargs):
    return actor_lib.SerialEnvironments(factory, ids, **kwargs)


def make_actor(factory, policy, ids=(0,), max_failures=5, **config):
    return actor_lib.EnvironmentActor(
        serial(factory, ids, max_failures=max_failures),
        policy,
        ids,
        config=actor_lib.ActorConfig(max_failures=max_failures, **config),
    )


class Scripted(dm_env.Environment):
    """An environment whose episodes are lists of `(reward, observation)` after a first one."""

    def __init__(self, observations, rewards=None, spec=None):
        self._observations = observations
        self._rewards = [0.0] * len(observations) if rewards is None else rewards
        self._spec = spec
        self._index = None

    def reset(self):
        self._index = 0
        return dm_env.restart(self._observations[0])

    def step(self, action):
        if self._index is None:
            return self.reset()
        self._index += 1
        reward, observation = self._rewards[self._index], self._observations[self._index]
        if self._index < len(self._observations) - 1:
            return dm_env.transition(reward, observation)
        self._index = None
        return dm_env.termination(reward, observation)

    def observation_spec(self):
        if self._spec is not None:
            return self._spec
        return tree.map_structure(
            lambda leaf: dm_specs.Array(np.shape(leaf), np.asarray(leaf).dtype),
            self._observations[0],
        )

    def action_spec(self):
        return dm_specs.DiscreteArray(5, np.int32)


def taken(environment, steps):
    """Copies of the time steps of an environment that is stepped with zeros."""
    spec = environment.spec
    actions = specs.zeros(spec.actions, (environment.size,))
    return [
        tree.map_structure(np.copy, environment.step(actions if index else None))
        for index in range(steps)
    ]


# What goes in comes out.


@pytest.mark.parametrize(
    "reward",
    [
        3,
        np.float64(0.1),
        np.int64(-7),
        np.array(2.5),
        True,
        np.bool_(True),
        np.array([4.5]),
        np.float16(0.5),
        0.1,
        None,
    ],
    ids=repr,
)
def test_a_reward_of_any_numeric_type_becomes_float32(reward):
    environment = serial(lambda seed: Scripted([0, 0], [None, reward]))
    _, last = taken(environment, 2)
    assert last.reward.dtype == np.float32
    assert last.reward[0] == np.float32(0.0 if reward is None else np.ravel(reward)[0])
    assert environment.failures == 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (np.ones(2), r"reward: expected one number, got float64 \(2,\)"),
        (np.ones((1, 1)), r"reward: expected one number, got float64 \(1, 1\)"),
        ("3", r"reward: expected one number, got <U1 \(\)"),
    ],
)
def test_a_reward_that_is_not_one_number_is_a_named_error(reward, message):
    environment = serial(lambda seed: Scripted([0, 0], [None, reward]), max_failures=0)
    with pytest.raises(actor_lib.EnvironmentFailure, match=message) as failure:
        taken(environment, 2)
    assert isinstance(failure.value.__cause__, specs.SpecError)


@pytest.mark.parametrize(
    ("spec", "second", "message"),
    [
        # NumPy would broadcast the first two, cut the third, and parse the fourth.
        (dm_specs.Array((3,), np.float32), np.float32(1), r"expected float32 \(3,\), got .*\(\)"),
        (dm_specs.Array((3,), np.float32), np.ones((1, 3)), r"got float64 \(1, 3\)"),
        (dm_specs.Array((), np.uint8), 0.5, r"expected uint8 \(\), got float64 \(\)"),
        (dm_specs.Array((), np.float32), "12", r"expected float32 \(\), got <U2"),
    ],
)
def test_an_observation_that_does_not_fit_its_spec_is_named(spec, second, message):
    first = np.zeros(spec.shape, spec.dtype)
    environment = serial(
        lambda seed: Scripted(
            [{"a": (first, 0)}, {"a": (second, 0)}],
            spec={"a": (spec, dm_specs.Array((), np.int32))},
        ),
        max_failures=0,
    )
    with pytest.raises(actor_lib.EnvironmentFailure, match=rf"observation/a/0: .*{message}"):
        taken(environment, 2)


def test_an_observation_with_too_few_parts_is_named():
    environment = serial(lambda seed: Scripted([(0, 1), (0,)]), max_failures=0)
    with pytest.raises(actor_lib.EnvironmentFailure, match="expected 2 arrays, got 1"):
        taken(environment, 2)


def test_a_text_observation_is_refused_with_its_path():
    spec = {"mission": dm_specs.StringArray(())}
    with pytest.raises(specs.SpecError, match=r"observation/mission: .*neither numeric"):
        serial(lambda seed: Scripted([{"mission": "go"}], spec=spec))


def table(index):
    """An observation of step `index` in every dtype and form that an environment may show."""
    random = np.random.default_rng(index)
    square = random.integers(-1000, 1000, (4, 4))
    return {
        "flag": np.array([index % 2 == 0, True, False]),
        "bytes": np.arange(256, dtype=np.uint8).reshape(16, 16) + np.uint8(index),
        "words": np.array([0, index, 65535], np.uint16),
        "tiny": np.array([-128, index - 5, 127], np.int8),
        "half": np.array([index / 3, -2.0], np.float16),
        "double": random.normal(size=3),
        "long": np.array(index - 2**31, np.int64),
        "scalar": np.float32(index),
        "empty": np.zeros((0,), np.float32),
        "nested": [(np.int32(index), {"deep": np.full((1, 2), index, np.uint32)})],
        "big_endian": np.array([index, 1 << 20], ">i4"),
        "big_endian_float": np.array([index + 0.25], ">f8"),
        "strided": square[::2, 1::2].astype(np.int32)[:, ::-1],
        "fortran": np.asfortranarray(square.astype(np.float32)),
    }


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_every_dtype_and_form_arrives_in_the_unroll(remote, tmp_path):
    steps = [table(index) for index in range(12)]
    factory = lambda seed: Scripted(steps)
    spec = specs.make_environment_spec(factory(0))
    sink = harness.Recorder()
    with harness.serving(counting(spec, 11), spec, sink, batch_sizes=(2,)) as inference_server:

        def act(policy):
            environment_actor = make_actor(factory, policy, ids=(0, 1))
            for _ in range(12):
                environment_actor.step()

        if not remote:
            act(inference_server)
        else:
            config = server.ServerConfig(address=f"unix:{tmp_path}/policy")
            with (
                server.PolicyServer(inference_server, config) as policy_server,
                client.RemotePolicyService(policy_server.address) as policy,
            ):
                act(policy)
    unrolls = sink.unrolls()
    assert len(unrolls) == 2
    for unroll in unrolls:
        stored = unroll.inputs.observation
        for index, expected in enumerate(steps):

            def check(path, got, want, index=index):
                want = np.asarray(want)
                narrow = {8: {"f": np.float32, "i": np.int32}.get(want.dtype.kind)}
                dtype = np.dtype(narrow.get(want.dtype.itemsize) or want.dtype.newbyteorder("="))
                assert got.dtype == dtype, path
                np.testing.assert_array_equal(got[index], want.astype(dtype), str(path))

            tree.map_structure_with_path(check, stored, expected)


class Echo(gymnasium.Env):
    """Shows the last action as its observation; both spaces begin elsewhere than at 0."""

    observation_space = gymnasium.spaces.Discrete(7, start=-3)
    action_space = gymnasium.spaces.Discrete(7, start=-3)

    def reset(self, *, seed=None, options=None):
        return np.int64(-3), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.int64(action), float(action), False, False, {}


def test_discrete_values_keep_their_start_all_the_way():
    factory = lambda seed: gymnasium_adapter.GymnasiumEnvironment(Echo(), seed)
    spec = specs.make_environment_spec(factory(0))
    sink = harness.Recorder()
    agent = counting(spec, 50, num_values=7)
    with harness.serving(agent, spec, sink, batch_sizes=(1,)) as inference_server:
        environment_actor = make_actor(factory, inference_server)
        for _ in range(52):
            environment_actor.step()
    (unroll,) = sink.unrolls()
    # An agent's 0 is the environment's -3, which shows what it did.
    assert set(unroll.action) == set(range(7))
    np.testing.assert_array_equal(unroll.inputs.observation[1:], unroll.action[:-1] - 3)
    np.testing.assert_array_equal(unroll.inputs.reward[1:], unroll.action[:-1] - 3)
    np.testing.assert_array_equal(unroll.inputs.previous_action[1:], unroll.action[:-1])


PLAIN = dm_specs.BoundedArray((2,), np.float32, -1, 9)
WIDE = dm_specs.BoundedArray((2,), np.float64, -1, 9)


@pytest.mark.parametrize("action_spec", [PLAIN, WIDE, {"a": WIDE, "b": (PLAIN,)}], ids=str)
def test_actions_come_in_the_environments_own_dtype_and_may_be_written_to(action_spec):
    class Writing(Scripted):
        def __init__(self):
            super().__init__([0] * 20)
            self.seen = []

        def action_spec(self):
            return action_spec

        def step(self, action):
            self.seen.append(tree.map_structure(lambda leaf: leaf.dtype, action))
            for leaf in tree.flatten(action):
                leaf.fill(0)
            return super().step(action)

    writing = Writing()
    spec = specs.make_environment_spec(writing)
    sink = harness.Recorder()
    with harness.serving(counting(spec, 10), spec, sink) as inference_server:
        environment_actor = make_actor(lambda seed: writing, inference_server)
        for _ in range(12):
            environment_actor.step()
    dtypes = tree.map_structure(lambda leaf: leaf.dtype, action_spec)
    assert writing.seen == [dtypes] * len(writing.seen)
    (unroll,) = sink.unrolls()
    assert all(leaf.any() for leaf in tree.flatten(unroll.action))


# Environments that fail.


class Fragile(harness.Numbered):
    """Raises at step 50 of every third episode (of 60 transitions)."""

    def step(self, action):
        if self._state[1] % 3 == 2 and self._state[2] == 49 and not self._over:
            raise ArithmeticError(f"episode {self._state[1]} broke")
        return super().step(action)


def check_no_transition_crosses(unrolls):
    """Observations are `[mark, episode, step]`; marks tell environments that were rebuilt apart."""
    for unroll in unrolls:
        where = unroll.inputs.observation
        kind = unroll.inputs.step_type
        for before, after, to in zip(where[:-1], where[1:], kind[1:], strict=True):
            if to == FIRST:
                assert after[2] == 0
            else:
                np.testing.assert_array_equal(after, np.add(before, (0, 0, 1)))


def test_an_environment_that_raises_is_rebuilt_and_its_broken_episode_is_no_data():
    sink, observed = harness.Recorder(), harness.Observed()
    built = []

    def factory(seed):
        built.append(Fragile(60, mark=len(built)))
        return built[-1]

    spec = harness.NUMBERED_SPEC
    with harness.serving(counting(spec, 10), spec, sink, observed) as inference_server:
        environment_actor = make_actor(factory, inference_server, ids=(3,), max_failures=100)
        for _ in range(700):
            environment_actor.step()
    # Two episodes of 61 steps and one of 50 steps that breaks off: 172 steps for each rebuild.
    assert len(built) == 1 + 700 // 172
    assert environment_actor._environment.failures == 4
    assert [environment.closed for environment in built] == [1, 1, 1, 1, 0]
    assert set(observed.episodes) == {(3, 60.0, 60, False)}
    assert len(observed.episodes) == 2 * 4
    unrolls = sink.unrolls()
    check_no_transition_crosses(unrolls)
    kinds = np.concatenate([u.inputs.step_type[1:] for u in unrolls])
    marks = np.concatenate([u.inputs.observation[1:, 0] for u in unrolls])
    changes = np.flatnonzero(np.diff(marks))
    assert len(changes) == 4
    assert set(kinds[changes]) == {MID}  # Broken off,
    assert set(kinds[changes + 1]) == {FIRST}  # and begun anew.


def test_the_other_environments_of_the_actor_go_on():
    built = []

    def factory(seed):
        built.append(harness.Numbered(1000) if len(built) else Fragile(60))
        return built[-1]

    environment = serial(factory, ids=(0, 1))
    steps = taken(environment, 400)
    assert environment.failures == 1
    assert [t.observation[1].tolist() for t in steps] == [[0, 0, index] for index in range(400)]


def test_a_reset_that_raises_twice_in_a_row_is_survived():
    resets = []

    class Stubborn(harness.Numbered):
        def reset(self):
            resets.append(len(resets))
            if len(resets) in (2, 3):
                raise OSError("the simulator does not start")
            return super().reset()

    environment = serial(lambda seed: Stubborn(3))
    steps = taken(environment, 12)
    assert environment.failures == 2
    kinds = [int(t.step_type[0]) for t in steps]
    assert kinds == [FIRST, MID, MID, LAST] * 3  # It broke between two episodes.


@pytest.mark.parametrize("where", ["build", "reset"])
def test_one_failure_too_many_ends_the_actor_with_the_original_cause(where):
    broken = ValueError("no licence")
    built = []

    class Dead(harness.Numbered):
        def step(self, action):
            raise broken

        def reset(self):
            if where == "reset" and len(built) > 1:
                raise broken
            return super().reset()

    def factory(seed):
        if where == "build" and built:
            raise broken
        built.append(Dead())
        return built[-1]

    spec = harness.NUMBERED_SPEC
    with harness.serving(counting(spec), spec) as inference_server:
        environment_actor = make_actor(factory, inference_server, max_failures=2)
        with pytest.raises(actor_lib.EnvironmentFailure) as failure:
            environment_actor.run()
        assert str(failure.value).startswith("environment 0: 3 failures within 600 s; the last: ")
        assert "ValueError: no licence" in str(failure.value)
        assert failure.value.__cause__ is broken
        assert inference_server.statistics().sessions == 0
    assert all(environment.closed for environment in built)


def test_failures_are_forgotten_after_the_window():
    class Dead(harness.Numbered):
        def step(self, action):
            raise ValueError("no licence")

    environment = serial(lambda seed: Dead(), max_failures=1, failure_window=1e-6)
    taken(environment, 5)
    assert environment.failures == 4


@pytest.mark.parametrize("field", ["observation", "reward", "discount"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_never_leaves_the_actor(field, value):
    class Ill(Scripted):
        def __init__(self, ill):
            super().__init__([np.float32(index) for index in range(6)])
            self._ill = ill

        def step(self, action):
            time_step = super().step(action)
            bad = self._ill and self._index == 3
            return time_step._replace(**{field: np.float32(value)}) if bad else time_step

    built = []

    def factory(seed):
        built.append(Ill(ill=len(built) < 2))
        return built[-1]

    environment = serial(factory)
    steps = taken(environment, 12)
    assert environment.failures == 2
    for time_step in steps:
        assert all(np.isfinite(leaf).all() for leaf in tree.flatten(time_step))
    kinds = [int(t.step_type[0]) for t in steps]
    assert kinds == [FIRST, MID, MID] * 2 + [FIRST, MID, MID, MID, MID, LAST]


def test_a_rebuilt_environment_that_begins_with_a_nan_is_rebuilt_again():
    built = []

    def factory(seed):
        first = np.float32(0 if len(built) in (0, 3) else np.nan)
        built.append(Scripted([first, np.float32(np.nan if not built else 1)]))
        return built[-1]

    environment = serial(factory)
    steps = taken(environment, 3)
    assert len(built) == 4
    assert environment.failures == 3
    assert [t.observation.tolist() for t in steps] == [[0], [0], [1]]
    assert [int(t.step_type[0]) for t in steps] == [FIRST, FIRST, LAST]


def test_a_close_that_raises_or_is_missing_hinders_nothing(caplog):
    class NoClose:
        """Neither a dm_env nor closed by anybody."""

        def __init__(self):
            inner = harness.Numbered()
            self.reset, self.step = inner.reset, inner.step
            self.observation_spec, self.action_spec = inner.observation_spec, inner.action_spec
            self.reward_spec, self.discount_spec = inner.reward_spec, inner.discount_spec

    class BadClose(harness.Numbered):
        def close(self):
            super().close()
            raise OSError("already gone")

    last = harness.Numbered()
    made = iter([NoClose(), BadClose(), last])
    environment = serial(lambda seed: next(made), ids=(0, 1, 2))
    taken(environment, 3)
    environment.close()
    assert last.closed == 1
    assert "environment 1: close failed" in caplog.text


# Seeds.


class Random(Scripted):
    """Shows random numbers of its seed."""

    def __init__(self, seed):
        super().__init__(np.random.default_rng(seed).normal(size=(6, 2)).astype(np.float32))


def traces(**kwargs):
    """First episodes of eight actors with one environment each, as bytes."""
    return [
        b"".join(t.observation.tobytes() for t in taken(serial(Random, ids=[me], **kwargs), 6))
        for me in range(8)
    ]


def test_eight_actors_have_eight_first_episodes_and_the_same_again():
    first = traces(seed=0)
    assert len(set(first)) == 8
    assert traces(seed=0) == first


@pytest.mark.parametrize("other", [{"evaluate": True}, {"incarnation": 1}, {"seed": 1}], ids=str)
def test_evaluation_later_incarnations_and_other_runs_have_seeds_of_their_own(other):
    assert not set(traces(seed=0)) & set(traces(**{"seed": 0, **other}))


def test_a_rebuilt_environment_does_not_repeat_its_stream():
    seeds = []

    class Dead(harness.Numbered):
        def step(self, action):
            raise ValueError("broken")

    def factory(seed):
        seeds.append(seed)
        return Dead()

    taken(serial(factory), 5)
    assert len(set(seeds)) == 5


# The service goes and comes.


def serve(spec, sink, address, **config):
    """A server of the counting agent on a socket, as a context that may be left and entered."""
    return harness.serving(counting(spec, 4), spec, sink, **config), server.ServerConfig(
        address=address
    )


def test_an_actor_finds_a_service_that_comes_back_and_keeps_its_episode(tmp_path):
    spec, address = harness.NUMBERED_SPEC, f"unix:{tmp_path}/policy"
    sinks = [harness.Recorder(), harness.Recorder()]
    environment = harness.Numbered(1000)
    with client.RemotePolicyService(address) as policy:
        environment_actor = make_actor(
            lambda seed: environment, policy, connect_timeout=harness.PATIENCE
        )
        serving, config = serve(spec, sinks[0], address)
        with serving as inference_server, server.PolicyServer(inference_server, config):
            for _ in range(10):
                assert environment_actor.step()
        away = harness.Call(environment_actor.step)  # Nobody is there.
        serving, config = serve(spec, sinks[1], address)
        with serving as inference_server, server.PolicyServer(inference_server, config):
            assert away.result()
            for _ in range(10):
                assert environment_actor.step()
    assert environment_actor.reconnections == 1
    # Steps 0 to 9 went to the first server; it knew nothing of what the second one saw.
    assert [u.inputs.observation[:, 2].tolist() for u in sinks[0].unrolls()] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
    ]
    assert [u.inputs.observation[:, 2].tolist() for u in sinks[1].unrolls()] == [
        [10, 11, 12, 13, 14],
        [14, 15, 16, 17, 18],
    ]
    first = sinks[1].unrolls()[0]
    assert first.inputs.step_type.tolist() == [MID] * 5
    assert first.initial_state["count"] == 0
    assert first.inputs.previous_action[0] == 0


def test_an_answer_that_took_longer_than_the_patience_to_connect_is_not_the_end():
    # The service was within reach all the time; patience begins when the answer did not come.
    spec, sink = harness.NUMBERED_SPEC, harness.GatedSink()
    with harness.serving(counting(spec), spec, sink, in_flight=1) as inference_server:
        environment_actor = make_actor(
            lambda seed: harness.Numbered(), inference_server, connect_timeout=0.3, step_timeout=0.6
        )
        environment_actor.step()
        environment_actor.step()

        def act():
            while environment_actor.reconnections == 0:
                environment_actor.step()

        acting = harness.Call(act)
        harness.wait_until(lambda: environment_actor.reconnections == 1)
        sink.open()
        acting.result()


def test_a_service_that_stays_away_ends_the_actor(tmp_path):
    with client.RemotePolicyService(f"unix:{tmp_path}/nobody") as policy:
        environment = harness.Numbered()
        environment_actor = make_actor(lambda seed: environment, policy, connect_timeout=0.2)
        with pytest.raises(service.Unavailable):
            environment_actor.run()
    assert environment.closed == 1


def test_an_actor_without_a_service_ends_when_told_to(tmp_path):
    asked = threading.Event()

    def stop():
        stopped = asked.is_set()
        asked.set()
        return stopped

    with client.RemotePolicyService(f"unix:{tmp_path}/nobody") as policy:
        environment_actor = make_actor(
            lambda seed: harness.Numbered(), policy, connect_timeout=100 * harness.PATIENCE
        )
        assert harness.Call(environment_actor.step, stop).result() is False


def test_a_newer_incarnation_ends_the_actor():
    spec = harness.NUMBERED_SPEC
    environment = harness.Numbered()
    with harness.serving(counting(spec), spec) as inference_server:
        environment_actor = make_actor(lambda seed: environment, inference_server)
        environment_actor.step()
        inference_server.open(harness.hello(spec, [0], actor_id="newer"))
        with pytest.raises(service.Fenced, match="replaced by newer"):
            environment_actor.run()
        assert environment.closed == 1
        assert inference_server.statistics().sessions == 1


def test_a_refusal_ends_the_actor():
    other = harness.make_spec(dm_specs.Array((2,), np.int32))
    with harness.serving(counting(other), other) as inference_server:
        environment_actor = make_actor(lambda seed: harness.Numbered(), inference_server)
        with pytest.raises(service.Refused, match=r"observation: expected int32 \(2,\)"):
            environment_actor.run()


def test_a_run_ends_when_told_to_and_leaves_nothing_open():
    spec = harness.NUMBERED_SPEC
    environment = harness.Numbered()
    with harness.serving(counting(spec), spec) as inference_server:
        environment_actor = make_actor(lambda seed: environment, inference_server)
        steps = iter(range(20))
        environment_actor.run(lambda: next(steps, None) is None)
        assert environment.closed == 1
        assert inference_server.statistics().sessions == 0


def test_actors_in_turns_are_served_while_others_are_stepped():
    spec, sink = harness.NUMBERED_SPEC, harness.Recorder()
    with harness.serving(counting(spec, 4), spec, sink) as inference_server:

        class Waiting(harness.Numbered):
            """Comes back from step k when k + 1 steps of the other environment are served."""

            taken = 0

            def step(self, action):
                self.taken += 1
                served = lambda: inference_server.statistics().rows
                harness.wait_until(lambda: served() > 2 * self.taken)
                return super().step(action)

        environments_ = [harness.Numbered(1000), Waiting(1000)]
        actors = [
            make_actor(lambda seed, e=e: e, inference_server, (index,))
            for index, e in enumerate(environments_)
        ]
        asked = iter(range(60))  # Three times in each round.
        actor_lib.run_in_turns(actors, lambda: next(asked, None) is None)
        assert inference_server.statistics().sessions == 0
    assert [environment.closed for environment in environments_] == [1, 1]
    for index in range(2):
        unrolls = sink.of(index)
        assert [u.inputs.observation[:, 2].tolist() for u in unrolls[:2]] == [
            [0, 1, 2, 3, 4],
            [4, 5, 6, 7, 8],
        ]
        # The actions that an environment took are those that are stored for its steps.
        stored = np.concatenate([u.action[:-1] for u in unrolls])
        assert stored.tolist() == list(map(int, environments_[index].actions[: len(stored)]))


def test_an_actor_that_sent_ahead_finds_a_service_that_comes_back(tmp_path):
    spec, address = harness.NUMBERED_SPEC, f"unix:{tmp_path}/policy"
    sink = harness.Recorder()
    with client.RemotePolicyService(address) as policy:
        environment_actor = make_actor(
            lambda seed: harness.Numbered(1000), policy, connect_timeout=harness.PATIENCE
        )
        serving, config = serve(spec, harness.Recorder(), address)
        with serving as inference_server, server.PolicyServer(inference_server, config):
            for _ in range(10):
                assert environment_actor.step()
                environment_actor.send()
        # Its answer is lost, or came and was not taken; the environment keeps its step.
        serving, config = serve(spec, sink, address)
        with serving as inference_server, server.PolicyServer(inference_server, config):
            for _ in range(10):
                assert environment_actor.step()
                environment_actor.send()
            environment_actor.close()
    first = sink.unrolls()[0].inputs.observation[:, 2].tolist()
    # Step 10 was sent to the first server; whether its answer was taken decides who sees 11 first.
    assert first in ([10, 11, 12, 13, 14], [11, 12, 13, 14, 15])


def test_real_environments_of_one_actor_are_whole_episodes_at_the_server():
    catch = environments.load("catch", rows=6)
    spec = specs.make_environment_spec(catch(seed=0))
    observed = harness.Observed()
    with harness.serving(counting(spec, num_values=3), spec, observer=observed) as inference_server:
        environment_actor = make_actor(catch, inference_server, ids=range(5))
        for _ in range(61):
            environment_actor.step()
        harness.settle(inference_server)
    # An episode is a first step and five transitions, of which the last is worth 1 or -1.
    assert len(observed.episodes) == 5 * 10
    assert {length for _, _, length, _ in observed.episodes} == {5}
    assert {total for _, total, _, _ in observed.episodes} <= {-1.0, 1.0}
    assert {environment_id for environment_id, *_ in observed.episodes} == set(range(5))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_failures": -1}, "max_failures must not be negative, got -1"),
        ({"failure_window": 0.0}, "failure_window must be positive, got 0"),
        ({"connect_timeout": -1.0}, "connect_timeout must be positive"),
        ({"step_timeout": 0.0}, "step_timeout must be positive"),
        ({"pipeline": 0}, "pipeline must be at least 1, got 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        actor_lib.ActorConfig(**config)


def test_ids_and_environments_must_be_as_many():
    with pytest.raises(ValueError, match="2 environment ids for 1 environments"):
        actor_lib.EnvironmentActor(serial(lambda seed: harness.Numbered()), None, (0, 1))
