"""Tests of the R2D2 agent: acting, learning, and that both mean the same by their numbers."""

import dataclasses
import functools
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs as dm_specs

import seedlib
from seedlib import types
from seedlib.agents import agent as agent_lib
from seedlib.agents import loading, networks, r2d2

FIRST, MID, LAST = 0, 1, 2
KEY = jax.random.PRNGKey(0)

# Most programs here run a few times only, so compiling them is what takes long.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

SMALL = r2d2.Config(
    unroll_length=6,
    burn_in=2,
    batch_size=4,
    hidden_sizes=(8,),
    lstm_size=8,
    dueling_size=8,
    learning_rate=0.01,
)


def at(inputs, step):
    return jax.tree.map(lambda x: x[:, step], inputs)


def act(agent, params, inputs):
    """Runs the policy over inputs `[B, L, ...]` as an inference server does.

    Returns:
      The outputs of each step, and the state before each, L-lists.
    """
    batch, length = inputs.step_type.shape
    state = agent.policy.initial_state(batch)
    step, outputs, states = jit(agent.policy.step), [], []
    for t in range(length):
        keys = jax.random.split(jax.random.PRNGKey(t), batch)
        states.append(state)
        outputs.append(step(params, keys, at(inputs, t), state))
        state = outputs[-1].state
    return outputs, states


def cut(inputs, outputs, states, start, length):
    """Returns the unroll of the steps from `start` on, as an assembler does."""
    stack = lambda *x: jnp.stack(x, axis=1)
    chosen = outputs[start : start + length]
    return types.Unroll(
        inputs=jax.tree.map(lambda x: x[:, start : start + length], inputs),
        action=jax.tree.map(stack, *[o.action for o in chosen]),
        extras=jax.tree.map(stack, *[o.extras for o in chosen]),
        initial_state=states[start],
        info=(),
    )


def random_state(agent, seed=0):
    """A training state whose values differ much; both networks have the same parameters."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(agent.init, KEY))
    params = jax.tree.map(lambda x: jnp.float32(0.4 * rng.normal(size=x.shape)), state.params)
    return state._replace(params=params, target_params=params)


def ones(batch):
    return np.ones(batch, np.float32)


def counting_network(num_actions):
    """A core that counts the steps of an episode; values are the count times 1, 2, ..., A."""

    def count(first, state):
        return jnp.where(first, 0.0, state) + 1.0

    def values(params, number):
        return params * number[..., None] * jnp.arange(1.0, num_actions + 1)

    def step(params, inputs, state):
        state = count(inputs.step_type == FIRST, state)
        return values(params, state), state

    def unroll(params, inputs, state):
        def one(state, first):
            state = count(first, state)
            return state, state

        state, numbers = jax.lax.scan(one, state, inputs.step_type == FIRST)
        return values(params, numbers), state

    return networks.Network(lambda key: jnp.ones(()), step, unroll, jnp.zeros)


def test_a_counting_core_counts_the_same_in_acting_and_learning(vector_spec, make_inputs):
    config = dataclasses.replace(SMALL, burn_in=3, rescaling_epsilon=None, unroll_length=9)
    network = counting_network(3)
    agent = r2d2.make_agent(vector_spec, config, network=network)
    inputs = make_inputs(vector_spec, 4, 40)
    outputs, states = act(agent, jnp.ones(()), inputs)

    expected, number = np.zeros((4, 40)), np.zeros(4)
    for t in range(40):
        number = np.where(inputs.step_type[:, t] == FIRST, 0, number) + 1
        expected[:, t] = number
    recorded = np.stack([o.extras["best_value"] for o in outputs], axis=1)
    np.testing.assert_array_equal(recorded, 3 * expected)

    for start in (0, 1, 13, 27):
        unroll = cut(inputs, outputs, states, start, 13)
        time_major = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), unroll.inputs)
        again, _ = network.unroll(jnp.ones(()), time_major, unroll.initial_state)
        np.testing.assert_array_equal(again.T[2], 3 * expected[:, start : start + 13])


@pytest.mark.parametrize("lstm_size", [None, 16])
def test_acting_and_learning_agree_on_values(vector_spec, make_inputs, lstm_size):
    config = dataclasses.replace(SMALL, lstm_size=lstm_size)
    network = r2d2.make_network(vector_spec, config)
    agent = r2d2.make_agent(vector_spec, config, network=network)
    params = random_state(agent).params
    inputs = make_inputs(vector_spec, 4, 30)
    outputs, states = act(agent, params, inputs)
    unroll = jit(network.unroll)

    for start in (0, 1, 15):
        sequence = cut(inputs, outputs, states, start, 15)
        assert (sequence.inputs.step_type[:, 1:-1] == FIRST).any()
        time_major = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sequence.inputs)
        again = jnp.swapaxes(unroll(params, time_major, sequence.initial_state)[0], 0, 1)
        np.testing.assert_allclose(sequence.extras["best_value"], again.max(-1), atol=1e-5)
        taken = jnp.take_along_axis(again, sequence.action[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(sequence.extras["action_value"], taken, atol=1e-5)
        assert np.ptp(again) > 0.5


@pytest.mark.parametrize(("burn_in", "unroll_length"), [(0, 7), (1, 1), (40, 7)])
def test_first_priorities_are_those_of_an_update_with_equal_weights(
    vector_spec, make_inputs, burn_in, unroll_length
):
    # The one comes from values that were recorded in acting, the other from running the stored
    # sequence again, burn-in first; over ends of episodes, both within it and after.
    config = dataclasses.replace(SMALL, burn_in=burn_in, unroll_length=unroll_length, batch_size=16)
    agent = r2d2.make_agent(vector_spec, config)
    state = random_state(agent)
    inputs = make_inputs(vector_spec, 16, 60)
    outputs, states = act(agent, state.params, inputs)
    first_priority, update = jit(agent.initial_priority), jit(agent.update)

    for start in (0, 1, 11):
        sequence = cut(inputs, outputs, states, start, agent.unroll.window)
        priorities = update(state, agent_lib.Batch(sequence, ones(16)), KEY).priorities
        np.testing.assert_allclose(first_priority(sequence), priorities, atol=2e-5)
        assert priorities.dtype == jnp.float32
        assert np.ptp(priorities) > 0.1


def test_a_burn_in_only_gives_the_state_to_start_from(vector_spec, make_batch):
    # An update after a burn-in is the one without, from the state that the burn-in leads to: no
    # error, reward or gradient of the burn-in is in it.
    network = r2d2.make_network(vector_spec, SMALL)
    with_burn_in = r2d2.make_agent(vector_spec, SMALL, network=network)
    without = r2d2.make_agent(vector_spec, dataclasses.replace(SMALL, burn_in=0), network=network)
    state = random_state(with_burn_in)
    unrolls = make_batch(with_burn_in, vector_spec).unrolls

    steps = unrolls._replace(initial_state=())
    early = jax.tree.map(lambda x: x[:, :2], steps)
    late = jax.tree.map(lambda x: x[:, 2:], steps)
    time_major = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), early.inputs)
    _, start = network.unroll(state.params, time_major, unrolls.initial_state)
    one = jit(with_burn_in.update)(state, agent_lib.Batch(unrolls, ones(4)), KEY)
    late = agent_lib.Batch(late._replace(initial_state=start), ones(4))
    other = jit(without.update)(state, late, KEY)

    np.testing.assert_allclose(one.metrics["gradient_norm"], other.metrics["gradient_norm"], 1e-5)
    np.testing.assert_allclose(one.priorities, other.priorities, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        one.state.params,
        other.state.params,
    )


def test_rewards_of_the_burn_in_and_of_no_transition_do_not_matter(vector_spec, make_batch):
    config = dataclasses.replace(SMALL, use_previous_reward=False)
    agent = r2d2.make_agent(vector_spec, config)
    state, batch = random_state(agent), make_batch(agent, vector_spec)
    inputs = batch.unrolls.inputs
    reward = inputs.reward.copy()
    reward[:, : config.burn_in + 1] = 1000.0  # The last of these came before the first action.
    reward[inputs.step_type == FIRST] = -1000.0
    dirty = batch._replace(unrolls=batch.unrolls._replace(inputs=inputs._replace(reward=reward)))
    update = jit(agent.update)
    jax.tree.map(
        np.testing.assert_array_equal, update(state, batch, KEY), update(state, dirty, KEY)
    )
    sequences = (batch.unrolls, dirty.unrolls)
    np.testing.assert_array_equal(*map(jit(agent.initial_priority), sequences))


def test_the_target_network_is_copied_each_period(vector_spec, make_batch):
    agent = r2d2.make_agent(vector_spec, dataclasses.replace(SMALL, target_period=3))
    batch, update = make_batch(agent, vector_spec), jit(agent.update)
    states = [jit(agent.init)(KEY)]
    for _ in range(7):
        states.append(update(states[-1], batch, KEY).state)
    for number, state in enumerate(states):
        copied = states[number - number % 3].params
        jax.tree.map(np.testing.assert_array_equal, state.target_params, copied)
        assert state.target_age == number % 3

    # Half-way through a period a run that goes on from a saved state keeps its phase.
    resumed = update(jax.device_put(jax.device_get(states[4])), batch, KEY).state
    jax.tree.map(np.testing.assert_array_equal, resumed, states[5])


def test_a_target_network_older_than_a_shorter_new_period_is_copied_at_once(
    vector_spec, make_batch
):
    agent = r2d2.make_agent(vector_spec, dataclasses.replace(SMALL, target_period=3))
    state = random_state(agent)._replace(target_age=jnp.int32(50))
    state = jit(agent.update)(state, make_batch(agent, vector_spec), KEY).state
    assert state.target_age == 0
    jax.tree.map(np.testing.assert_array_equal, state.target_params, state.params)


def table_agent(spec, **changes):
    """An agent whose values are its parameters, `[A]` at every step."""
    network = networks.Network(
        init=lambda key: jnp.zeros(3),
        step=lambda params, inputs, state: (params + 0 * inputs.reward[..., None], state),
        unroll=lambda params, inputs, state: (params + 0 * inputs.reward[..., None], state),
        initial_state=lambda batch: (),
    )
    config = dataclasses.replace(SMALL, n_step=1, rescaling_epsilon=None, **changes)
    return r2d2.make_agent(spec, config, network=network)


def test_an_update_chooses_by_the_online_network_and_values_by_the_other(vector_spec, make_batch):
    agent = table_agent(vector_spec, batch_size=1, unroll_length=1, burn_in=0, discount=0.9)
    batch = make_batch(agent, vector_spec)
    inputs = batch.unrolls.inputs._replace(
        step_type=np.array([[FIRST, MID]], np.uint8),
        reward=np.array([[0, 1]], np.float32),
        discount=np.array([[1, 1]], np.float32),
    )
    batch = batch._replace(
        unrolls=batch.unrolls._replace(inputs=inputs, action=np.zeros((1, 2), np.int32))
    )
    state = jit(agent.init)(KEY)
    state = state._replace(
        params=jnp.array([1.0, 2.0, 10.0]), target_params=jnp.array([7.0, 5.0, 3.0])
    )
    update = jit(agent.update)(state, batch, KEY)
    # 1 + .9 * 3 = 3.7, for a value of 1; the loss is half the square of the difference.
    np.testing.assert_allclose(update.metrics["target"], 3.7, rtol=1e-6)
    np.testing.assert_allclose(update.priorities, [2.7], rtol=1e-6)
    np.testing.assert_allclose(update.metrics["loss"], 2.7**2 / 2, rtol=1e-6)
    # Only the value of the action taken moves.
    np.testing.assert_array_equal(update.state.params[1:], state.params[1:])
    assert update.state.params[0] > 1.0


def weighted_batch(weight):
    """Row 0 pays 1, 2 (no transition) and 3; row 1 pays 10, 20 and 30. 1000s are the burn-in's."""
    inputs = types.PolicyInput(
        step_type=np.array([[1, 0, 1, 0, 1], [1, 1, 1, 1, 2]], np.uint8),
        reward=np.array([[1000, 1000, 1, 2, 3], [1000, 1000, 10, 20, 30]], np.float32),
        discount=np.ones((2, 5), np.float32),
        observation=np.zeros((2, 5, 5), np.float32),
        previous_action=np.zeros((2, 5), np.int32),
        environment_id=np.zeros((2, 5), np.int32),
        evaluate=np.zeros((2, 5), np.bool_),
    )
    extras = {name: np.zeros((2, 5), np.float32) for name in ("action_value", "best_value")}
    unrolls = types.Unroll(inputs, np.zeros((2, 5), np.int32), extras, (), ())
    return agent_lib.Batch(unrolls, np.array(weight, np.float32))


@pytest.mark.parametrize(("weight", "second"), [([1, 0.5], 0.5), ([20, 10], 0.5), ([3, 3], 1.0)])
def test_loss_is_weighted_by_normalised_weights(vector_spec, weight, second):
    agent = table_agent(vector_spec, unroll_length=3, burn_in=1, batch_size=2, discount=0.0)
    batch = weighted_batch(weight)
    update = jit(agent.update)(jit(agent.init)(KEY), batch, KEY)
    # Values are 0, so errors are rewards; half their squares, over 5 valid transitions, times T.
    expected = 3 * 0.5 * (1 + 9 + second * (100 + 400 + 900)) / 5
    np.testing.assert_allclose(update.metrics["loss"], expected, rtol=1e-6)
    assert update.metrics["valid_transitions"] == 5
    np.testing.assert_allclose(update.metrics["importance_weight"], (1 + second) / 2, rtol=1e-6)
    # .9 * 3 + .1 * (1 + 3) / 2 and .9 * 30 + .1 * 20: weights are not in them.
    np.testing.assert_allclose(update.priorities, [2.9, 29.0], rtol=1e-6)
    np.testing.assert_allclose(agent.initial_priority(batch.unrolls), [2.9, 29.0], rtol=1e-6)


def test_weights_of_zero_leave_everything_finite(vector_spec):
    agent = table_agent(vector_spec, unroll_length=3, burn_in=1, batch_size=2)
    state = jit(agent.init)(KEY)
    update = jit(agent.update)(state, weighted_batch([0, 0]), KEY)
    np.testing.assert_array_equal(update.state.params, state.params)
    assert np.isfinite(update.priorities).all()


# What acting does.


def many_actions_agent(make_spec, **changes):
    spec = make_spec(dm_specs.Array((2,), np.float32), dm_specs.DiscreteArray(1000, np.int32))
    return spec, r2d2.make_agent(spec, dataclasses.replace(SMALL, lstm_size=None, **changes))


@pytest.mark.parametrize("changes", [{}, {"exploration": 0.7, "exploration_exponent": 3.0}])
def test_each_environment_explores_with_its_own_probability(make_spec, make_inputs, changes):
    spec, agent = many_actions_agent(make_spec, num_environments=8, **changes)
    base, exponent = changes.get("exploration", 0.4), changes.get("exploration_exponent", 8.0)
    rows = 4096
    one = at(make_inputs(spec, 1, 1), 0)
    inputs = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), one)
    params, step = random_state(agent).params, jit(agent.policy.step)
    greedy = step(params, jax.random.split(KEY, 1), one._replace(evaluate=np.ones(1, bool)), ())
    # Ids beyond the last begin the scale again: 11 is as 3 is.
    for number in (0, 1, 3, 7, 11):
        ids = np.full(rows, number, np.int32)
        keys = jax.random.split(jax.random.PRNGKey(number), rows)
        action = step(params, keys, inputs._replace(environment_id=ids), ()).action
        explored = np.mean(action != greedy.action)
        expected = base ** np.linspace(1, exponent, 8)[number % 8]
        deviation = np.sqrt(expected * (1 - expected) / rows)
        assert abs(explored - expected) < 5 * deviation + 1e-3
        if number == 0:
            # Anywhere: every tenth of the actions is reached.
            reached = np.histogram(action[action != greedy.action], bins=10, range=(0, 1000))[0]
            assert reached.min() > 0.5 * reached.mean()


def test_rows_explore_with_their_own_keys(vector_spec, make_inputs):
    agent = r2d2.make_agent(vector_spec, dataclasses.replace(SMALL, exploration=1.0))
    params, step = random_state(agent).params, jit(agent.policy.step)
    one = at(make_inputs(vector_spec, 1, 1), 0)
    same = jax.tree.map(lambda x: np.repeat(x, 64, axis=0), one)
    keys, state = jax.random.split(KEY, 64), agent.policy.initial_state

    actions = np.asarray(step(params, keys, same, state(64)).action)
    assert set(actions.tolist()) == {0, 1, 2}

    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(step(params, keys[order], same, state(64)).action, actions[order])
    for row in (0, 17, 63):
        assert step(params, keys[row : row + 1], one, state(1)).action[0] == actions[row]
    alike = step(params, jnp.tile(keys[:1], (64, 1)), same, state(64)).action
    assert len(set(alike.tolist())) == 1


def test_evaluated_rows_take_the_best_action(vector_spec, make_inputs):
    config = dataclasses.replace(SMALL, exploration=1.0)
    network = r2d2.make_network(vector_spec, config)
    agent = r2d2.make_agent(vector_spec, config, network=network)
    inputs = at(make_inputs(vector_spec, 64, 1), 0)
    inputs = inputs._replace(evaluate=np.arange(64) % 2 == 0)
    params, state = random_state(agent).params, agent.policy.initial_state(64)
    output = jit(agent.policy.step)(params, jax.random.split(KEY, 64), inputs, state)
    q = np.asarray(network.step(params, inputs, state)[0])
    differs = np.asarray(output.action) != q.argmax(-1)
    assert not differs[::2].any()
    assert differs[1::2].any()
    np.testing.assert_allclose(output.extras["best_value"], q.max(-1), atol=1e-5)
    taken = q[np.arange(64), output.action]
    np.testing.assert_allclose(output.extras["action_value"], taken, atol=1e-5)


def test_actions_have_the_range_and_shape_of_their_spec(make_spec, make_inputs, make_batch):
    spec = make_spec(
        {"image": dm_specs.Array((12, 12, 1), np.uint8), "flag": dm_specs.Array((), np.bool_)},
        {"move": dm_specs.BoundedArray((1,), np.int8, -7, -4)},
    )
    config = dataclasses.replace(SMALL, exploration=1.0, compute_dtype="bfloat16")
    agent = r2d2.make_agent(spec, config)
    state = random_state(agent)
    output = jit(agent.policy.step)(
        state.params,
        jax.random.split(KEY, 64),
        at(make_inputs(spec, 64, 1), 0),
        agent.policy.initial_state(64),
    )
    move = np.asarray(output.action["move"])
    assert move.shape == (64, 1) and move.dtype == np.int8
    assert set(move.ravel().tolist()) == {-7, -6, -5, -4}
    assert {x.dtype for x in jax.tree.leaves(output.extras)} == {jnp.dtype("float32")}

    batch = make_batch(agent, spec)
    update = jit(agent.update)(state, batch, KEY)
    assert np.isfinite(update.metrics["loss"])
    assert {x.dtype for x in jax.tree.leaves(update.state.params)} == {jnp.dtype("float32")}


def test_the_learner_moves_the_value_of_the_action_taken(make_spec, make_batch):
    spec = make_spec(
        dm_specs.Array((2,), np.float32), dm_specs.BoundedArray((1,), np.int32, -7, -5)
    )
    agent = table_agent(spec, unroll_length=3, burn_in=1, batch_size=2, discount=0.0)
    for taken in (-7, -6, -5):
        batch = weighted_batch([1, 1])
        action = np.full((2, 5, 1), taken, np.int32)
        batch = batch._replace(unrolls=batch.unrolls._replace(action=action))
        params = jit(agent.update)(jit(agent.init)(KEY), batch, KEY).state.params
        np.testing.assert_array_equal(params != 0, np.arange(3) == taken + 7)


# What learning does.


CHANGES = [
    {"discount": 0.5},
    {"n_step": 1},
    {"n_step": 5},
    {"rescaling_epsilon": 0.5},
    {"rescaling_epsilon": None},
    {"burn_in": 3, "unroll_length": 5},
    {"target_period": 5},
    {"priority_eta": 0.1},
    {"reward_scale": 0.5},
    {"reward_clip": 0.3},
    {"learning_rate": 0.02},
    {"adam_epsilon": 0.1},
    {"beta1": 0.5},
    {"beta2": 0.9},
    {"max_gradient_norm": 0.01},
    {"max_gradient_norm": None},
]


@pytest.fixture(scope="module")
def after_three(vector_spec, make_batch):
    """`after_three(config) -> (parameters, priorities)` after three updates."""
    base = dataclasses.replace(
        SMALL,
        hidden_sizes=(),
        lstm_size=None,
        target_period=1,
        max_gradient_norm=1.0,
        adam_epsilon=0.01,
    )
    network = r2d2.make_network(vector_spec, base)
    params = network.init(KEY)
    network = network._replace(init=lambda key: params)
    batch = make_batch(r2d2.make_agent(vector_spec, base, network), vector_spec)
    known = {}

    def run(**changes):
        config = dataclasses.replace(base, **changes)
        if config not in known:
            agent = r2d2.make_agent(vector_spec, config, network)
            update = jit(agent.update)
            result = update(agent.init(KEY), batch, KEY)
            for _ in range(2):
                result = update(result.state, batch, KEY)
            known[config] = result.state.params, result.priorities
        return known[config]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_number_reaches_the_update(after_three, change):
    (params, priorities), (params_2, priorities_2) = after_three(), after_three(**change)
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, params_2)
    if "priority_eta" in change:
        assert max(jax.tree.leaves(gaps)) == 0
        assert np.abs(priorities - priorities_2).max() > 1e-2
    else:
        assert max(jax.tree.leaves(gaps)) > 1e-5


def test_the_numbers_of_the_replay_reach_its_settings(vector_spec):
    config = dataclasses.replace(
        SMALL,
        replay_capacity=77,
        replay_minimum=7,
        samples_per_sequence=1.5,
        priority_exponent=0.8,
        importance_exponent=0.3,
        unroll_period=4,
    )
    agent = r2d2.make_agent(vector_spec, config)
    assert agent.replay == r2d2.ReplaySettings(77, 7, 1.5, 0.8, 0.3)
    assert agent.unroll == agent_lib.UnrollShape(length=6, burn_in=2, period=4)


def test_gamma_zero_makes_the_target_the_reward(vector_spec, make_batch):
    config = dataclasses.replace(SMALL, discount=0.0, rescaling_epsilon=None)
    agent = r2d2.make_agent(vector_spec, config)
    batch = make_batch(agent, vector_spec)
    metrics = jit(agent.update)(random_state(agent), batch, KEY).metrics
    inputs = batch.unrolls.inputs
    valid = inputs.step_type[:, 3:] != FIRST
    np.testing.assert_allclose(metrics["target"], inputs.reward[:, 3:][valid].mean(), atol=1e-5)


def test_a_batch_without_valid_transitions_changes_no_parameter(vector_spec, make_batch):
    agent = r2d2.make_agent(vector_spec, SMALL)
    batch, state = make_batch(agent, vector_spec), random_state(agent)
    inputs = batch.unrolls.inputs._replace(
        step_type=np.full_like(batch.unrolls.inputs.step_type, FIRST)
    )
    batch = batch._replace(unrolls=batch.unrolls._replace(inputs=inputs))
    update = jit(agent.update)(state, batch, KEY)
    jax.tree.map(np.testing.assert_array_equal, update.state.params, state.params)
    assert all(np.isfinite(x) for x in update.metrics.values())
    np.testing.assert_array_equal(update.priorities, 0)


def test_metrics_are_scalars_and_each_sequence_has_a_priority(vector_spec, make_batch):
    agent = r2d2.make_agent(vector_spec, SMALL)
    batch = make_batch(agent, vector_spec)
    update = jit(agent.update)(random_state(agent), batch, KEY)
    assert all(x.shape == () for x in update.metrics.values())
    assert set(update.metrics) >= {
        "loss", "gradient_norm", "value", "target", "error", "priority", "priority_max",
        "importance_weight", "valid_transitions",
    }  # fmt: skip
    for priorities in (update.priorities, jit(agent.initial_priority)(batch.unrolls)):
        assert priorities.shape == (4,) and priorities.dtype == jnp.float32
        assert np.isfinite(priorities).all() and (priorities >= 0).all()


def test_update_may_be_given_its_state_away(vector_spec, make_batch):
    agent = r2d2.make_agent(vector_spec, dataclasses.replace(SMALL, target_period=2))
    batch = make_batch(agent, vector_spec)
    results = []
    for donate in ((), (0,)):
        # From the start, and over a copy: there both networks have the same values.
        update, start = jit(agent.update, donate_argnums=donate), jit(agent.init)(KEY)
        state = start
        for _ in range(5):
            state = update(state, batch, KEY).state
        results.append(state)
        assert all(x.is_deleted() == bool(donate) for x in jax.tree.leaves(start))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_both_networks_of_a_first_state_are_apart(vector_spec):
    # Not traced, where the same array twice would stay the same array, which cannot be given away.
    agent = table_agent(vector_spec, unroll_length=3, burn_in=1, batch_size=2)
    start = agent.init(KEY)
    update = jit(agent.update, donate_argnums=(0,))
    state = update(start, weighted_batch([1, 1]), KEY).state
    assert all(x.is_deleted() for x in jax.tree.leaves(start))
    assert np.all(state.target_params == 0) and np.any(state.params != 0)


@pytest.mark.parametrize(
    ("discount", "first", "last"),
    # One per step, gamma .9. Truncated: the return goes on after the cut, 1 / (1 - .9) = 10 at
    # every step. Terminated: 1 at the tenth step, (1 - .9^10) / (1 - .9) = 6.513 at the first.
    [(1.0, 10.0, 10.0), (0.0, 6.513, 1.0)],
)
@pytest.mark.parametrize("rescaling_epsilon", [None, 1e-3])
def test_values_learnt_are_those_of_truncation_and_termination(
    make_spec, discount, first, last, rescaling_epsilon
):
    spec = make_spec(dm_specs.DiscreteArray(10, np.int32), dm_specs.DiscreteArray(2, np.int32))
    config = r2d2.Config(
        unroll_length=20,
        burn_in=0,
        batch_size=11,
        discount=0.9,
        hidden_sizes=(),
        lstm_size=None,
        dueling_size=32,
        use_previous_action=False,
        use_previous_reward=False,
        target_period=5,
        learning_rate=0.003,
        rescaling_epsilon=rescaling_epsilon,
    )
    network = r2d2.make_network(spec, config)
    agent = r2d2.make_agent(spec, config, network=network)

    # Ten transitions are eleven steps. The final observation is the first one again: the task
    # itself never ends, so a cut changes nothing about what is to come.
    step = np.arange(11)[:, None] + np.arange(21)
    place = step % 11
    step_type = np.where(place == 0, FIRST, np.where(place == 10, LAST, MID)).astype(np.uint8)
    inputs = types.PolicyInput(
        step_type=step_type,
        reward=(step_type != FIRST).astype(np.float32),
        discount=np.where(step_type == LAST, discount, 1.0).astype(np.float32),
        observation=(place % 10).astype(np.int32),
        previous_action=np.zeros_like(place, np.int32),
        environment_id=np.zeros_like(place, np.int32),
        evaluate=np.zeros_like(place, np.bool_),
    )
    action = np.random.default_rng(0).integers(0, 2, place.shape).astype(np.int32)
    batch = agent_lib.Batch(types.Unroll(inputs, action, {}, (), ()), ones(11))

    update, state = jit(agent.update), jit(agent.init)(KEY)
    for _ in range(600):
        state = update(state, batch, KEY).state
    q, _ = network.step(state.params, jax.tree.map(lambda x: x[0, :10], inputs), ())
    value = r2d2.value_transform(rescaling_epsilon).apply_inv(q)
    for number, expected in ((0, first), (9, last)):
        np.testing.assert_allclose(value[number], expected, atol=0.3)


# What is made, and what is refused.


def test_a_network_of_the_wrong_size_is_refused(vector_spec):
    with pytest.raises(ValueError, match=r"must have shape \(1, 3\).*got \(1, 7\)"):
        r2d2.make_agent(vector_spec, SMALL, network=counting_network(7))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (dm_specs.BoundedArray((2,), np.float32, -1, 1), "action: BoundedArray of dtype float32"),
        (dm_specs.BoundedArray((2,), np.int32, 0, 1), "action: must be one number.*got 2"),
        ({"a": dm_specs.DiscreteArray(2), "b": dm_specs.DiscreteArray(3)}, "one number.*got 2"),
    ],
)
def test_actions_that_are_not_one_choice_are_refused(make_spec, actions, message):
    spec = make_spec(dm_specs.Array((2,), np.float32), actions)
    with pytest.raises(ValueError, match=message) as error:
        r2d2.make_agent(spec)
    assert "\n" not in str(error.value)


def test_defaults_make_an_agent(vector_spec):
    agent = r2d2.make_agent(vector_spec)
    assert (agent.unroll.length, agent.unroll.window, agent.batch_size) == (20, 26, 32)
    assert agent.replay.capacity == 5_000
    assert jax.tree.leaves(agent.policy.initial_state(3))[0].shape == (3, 64)


def test_atari_config_is_the_published_one(make_spec):
    spec = make_spec(dm_specs.Array((84, 84, 4), np.uint8), dm_specs.DiscreteArray(18, np.int32))
    config = r2d2.atari_config(num_environments=256)
    agent = r2d2.make_agent(spec, config)
    assert (agent.unroll.length, agent.unroll.burn_in, agent.batch_size) == (80, 40, 64)
    assert (config.n_step, config.discount, config.target_period) == (5, 0.997, 2500)
    assert (config.priority_eta, config.rescaling_epsilon) == (0.9, 1e-3)
    assert (config.priority_exponent, config.importance_exponent) == (0.9, 0.6)
    assert (config.learning_rate, config.adam_epsilon) == (1e-4, 1e-3)
    assert (config.exploration, config.exploration_exponent) == (0.4, 8.0)
    assert [x.shape for x in agent.policy.initial_state(2)] == [(2, 512), (2, 512)]
    shapes = {x.shape for x in jax.tree.leaves(jax.eval_shape(agent.init, KEY).params)}
    # Both streams have 512 units, and end in one value and in 18 advantages.
    assert {(512, 2048), (512, 512), (512, 1), (512, 18)} <= shapes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unroll_length", 0),
        ("burn_in", -1),
        ("unroll_period", 0),
        ("unroll_period", 27),
        ("batch_size", 0),
        ("n_step", 0),
        ("discount", 1.1),
        ("rescaling_epsilon", 0.0),
        ("target_period", 0),
        ("exploration", 1.5),
        ("exploration_exponent", 0.5),
        ("num_environments", 0),
        ("replay_capacity", 0),
        ("replay_minimum", 5_001),
        ("samples_per_sequence", 0.0),
        ("priority_exponent", -0.1),
        ("importance_exponent", float("nan")),
        ("priority_eta", 1.1),
        ("reward_clip", 0.0),
        ("learning_rate", float("inf")),
        ("adam_epsilon", 0.0),
        ("beta1", 1.0),
        ("max_gradient_norm", -1.0),
        ("torso", "vit"),
        ("hidden_sizes", (64, 0)),
        ("lstm_size", 0),
        ("dueling_size", 0),
        ("compute_dtype", "float16"),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=field) as error:
        r2d2.Config(**{field: value})
    assert repr(value) in str(error.value)


def test_a_misspelt_setting_is_an_error():
    with pytest.raises(TypeError, match="burnin"):
        r2d2.Config(burnin=3)


def test_the_agent_cannot_be_run_by_name_before_there_is_a_replay(vector_spec):
    with pytest.raises(loading.AgentError, match="unknown agent 'r2d2'"):
        loading.AgentFactory("r2d2", vector_spec).check()


def run_python(code, *arguments, **variables):
    """Runs code in a process of its own and returns what it prints."""
    environment = dict(os.environ, **variables)
    environment["PYTHONPATH"] = str(pathlib.Path(seedlib.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_settings_need_no_jax():
    code = (
        "import sys; from seedlib.agents import r2d2; r2d2.atari_config(); "
        "print(sorted({'jax', 'rlax', 'tensorflow'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"


# Devices are made when JAX starts, so this runs in a process of its own.
SHARDED_UPDATE = """
import pickle, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from seedlib.agents import r2d2

spec, config, batch = pickle.load(open(sys.argv[1], "rb"))
agent = r2d2.make_agent(spec, config)
results = []
for count in (1, 8):
    mesh = Mesh(np.array(jax.devices()[:count]), ("batch",))
    shared = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.jit(agent.init, out_shardings=whole)(jax.random.PRNGKey(0))
    arguments = state, jax.device_put(batch, shared), jax.random.PRNGKey(1)
    update = jax.jit(agent.update, out_shardings=whole).lower(*arguments).compile()
    new, metrics, priorities = jax.device_get(update(*arguments))
    # Devices exchange gradients, sums and priorities, never frames: a gather is of 16 numbers.
    for line in update.as_text().splitlines():
        assert "all-to-all" not in line, line
        assert " all-gather(" not in line or "f32[16]{0} all-gather(" in line, line
    results.append((jax.tree.leaves(new.params), metrics, priorities))
for params, metrics, priorities in results[1:]:
    for a, b in zip(params, results[0][0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, results[0][1][name], atol=1e-4, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(priorities, results[0][2], rtol=1e-4)
print("same on", len(jax.devices()), "devices")
"""


@pytest.mark.slow
def test_the_update_does_not_depend_on_how_many_devices_share_the_batch(
    vector_spec, make_batch, tmp_path
):
    config = dataclasses.replace(SMALL, batch_size=16, adam_epsilon=0.01)
    agent = r2d2.make_agent(vector_spec, config)
    batch = jax.device_get(make_batch(agent, vector_spec))
    weight = np.random.default_rng(0).uniform(0.1, 1, 16).astype(np.float32)
    batch = batch._replace(weight=weight)
    valid = (batch.unrolls.inputs.step_type[:, 3:] != FIRST).sum(axis=1)
    assert len(set(valid.tolist())) > 1  # or a mean of means would be right too
    with open(tmp_path / "batch", "wb") as file:
        pickle.dump((vector_spec, config, batch), file)

    printed = run_python(
        SHARDED_UPDATE,
        str(tmp_path / "batch"),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_PLATFORMS="cpu",
    )
    assert "same on 8 devices" in printed
