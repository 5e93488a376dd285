"""Tests of the V-trace agent: acting, learning, and that both mean the same by their numbers."""

import dataclasses
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
from seedlib.agents import networks, vtrace

FIRST, MID, LAST = 0, 1, 2
KEY = jax.random.PRNGKey(0)
SMALL = vtrace.Config(unroll_length=6, batch_size=4, hidden_sizes=(8,), learning_rate=0.01)


def at(inputs, step):
    return jax.tree.map(lambda x: x[:, step], inputs)


def act(agent, params, inputs):
    """Runs the policy over inputs `[B, L, ...]`, as an inference server does, into an unroll."""
    batch, length = inputs.step_type.shape
    state = initial_state = agent.policy.initial_state(batch)
    step, outputs = jax.jit(agent.policy.step), []
    for t in range(length):
        keys = jax.random.split(jax.random.PRNGKey(t), batch)
        outputs.append(step(params, keys, at(inputs, t), state))
        state = outputs[-1].state
    stack = lambda *x: jnp.stack(x, axis=1)
    action = jax.tree.map(stack, *[o.action for o in outputs])
    extras = jax.tree.map(stack, *[o.extras for o in outputs])
    return types.Unroll(inputs, action, extras, initial_state, ())


@pytest.mark.parametrize("lstm_size", [None, 16])
def test_acting_and_learning_agree_on_log_probabilities(vector_spec, make_inputs, lstm_size):
    config = dataclasses.replace(
        SMALL,
        unroll_length=14,
        lstm_size=lstm_size,
        use_previous_action=True,
        use_previous_reward=True,
    )
    network = vtrace.make_network(vector_spec, config, 3)
    agent = vtrace.make_agent(vector_spec, config, network=network)
    # Parameters far from the first ones, so that the policy is far from uniform.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.5 * rng.normal(size=x.shape), jax.jit(agent.init)(KEY).params
    )
    params = jax.tree.map(jnp.float32, params)
    inputs = make_inputs(vector_spec, 4, 15)
    assert (inputs.step_type[:, 1:-1] == FIRST).any()

    unroll = act(agent, params, inputs)
    time_major = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), inputs)
    outputs, _ = jax.jit(network.unroll)(params, time_major, unroll.initial_state)

    learnt = jax.nn.log_softmax(jnp.swapaxes(outputs.parameters, 0, 1))
    np.testing.assert_allclose(jax.nn.log_softmax(unroll.extras["logits"]), learnt, atol=1e-5)
    assert np.ptp(learnt) > 0.5

    state = jax.jit(agent.init)(KEY)._replace(params=params)
    metrics = jax.jit(agent.update)(
        state, agent_lib.Batch(unroll, np.ones(4, np.float32)), KEY
    ).metrics
    np.testing.assert_allclose(metrics["rho"], 1.0, atol=1e-5)


def test_rows_are_sampled_with_their_own_keys(vector_spec, make_inputs):
    agent = vtrace.make_agent(vector_spec, SMALL)
    params, step = jax.jit(agent.init)(KEY).params, jax.jit(agent.policy.step)
    one = at(make_inputs(vector_spec, 1, 1), 0)
    same = jax.tree.map(lambda x: np.repeat(x, 64, axis=0), one)
    keys = jax.random.split(KEY, 64)

    actions = np.asarray(step(params, keys, same, ()).action)
    assert set(actions.tolist()) == {0, 1, 2}

    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(step(params, keys[order], same, ()).action, actions[order])
    for row in (0, 17, 63):
        assert step(params, keys[row : row + 1], one, ()).action[0] == actions[row]
    assert len(set(step(params, jnp.tile(keys[:1], (64, 1)), same, ()).action.tolist())) == 1


def test_evaluated_rows_take_the_mode(vector_spec, make_inputs):
    agent = vtrace.make_agent(vector_spec, SMALL)
    inputs = at(make_inputs(vector_spec, 64, 1), 0)
    inputs = inputs._replace(evaluate=np.arange(64) % 2 == 0)
    output = jax.jit(agent.policy.step)(
        jax.jit(agent.init)(KEY).params, jax.random.split(KEY, 64), inputs, ()
    )
    differs = np.asarray(output.action != output.extras["logits"].argmax(-1))
    assert not differs[::2].any()
    assert differs[1::2].any()
    assert output.extras["logits"].shape == (64, 3)
    assert output.extras["logits"].dtype == jnp.float32


CHANGES = [
    {"discount": 0.5},
    {"lambda_": 0.5},
    {"clip_rho": 0.5},
    {"clip_rho": 3.0},
    {"clip_pg_rho": 0.5},
    {"clip_pg_rho": 3.0},
    {"entropy_cost": 0.1},
    {"baseline_cost": 2.0},
    {"reward_scale": 0.5},
    {"reward_clip": 0.3},
    {"learning_rate": 0.02},
    {"final_learning_rate": 0.005},
    {"schedule_steps": 3},
    {"learning_rate_schedule": "constant"},
    {"optimizer": "rmsprop"},
    {"epsilon": 0.1},
    {"beta1": 0.5},
    {"beta2": 0.9},
    {"decay": 0.5},
    {"max_gradient_norm": 0.01},
    {"max_gradient_norm": None},
]


def two_updates(spec, config, batch):
    """The loss at the start, and the parameters after two updates."""
    agent = vtrace.make_agent(spec, config)
    # Compiled without optimisation, for there are many.
    update = jax.jit(agent.update, compiler_options={"xla_backend_optimization_level": 0})
    state = agent.init(KEY)
    first = update(state, batch, KEY)
    second = update(first.state, batch, KEY)
    return first.metrics["loss"], second.state.params


@pytest.fixture(scope="module")
def sensitivity(vector_spec, make_batch):
    """`sensitivity(changes, base) -> (change of the loss, change of the parameters)`."""
    base = dataclasses.replace(
        SMALL,
        hidden_sizes=(),
        learning_rate=0.1,
        learning_rate_schedule="linear",
        schedule_steps=2,
        max_gradient_norm=1.0,
        # Large enough that adam's step still depends on the gradient's size.
        epsilon=0.01,
    )
    batch = make_batch(vtrace.make_agent(vector_spec, base), vector_spec)
    known = {}

    def run(config):
        if config not in known:
            known[config] = two_updates(vector_spec, config, batch)
        return known[config]

    def compare(**changes):
        reference = dataclasses.replace(base, optimizer="rmsprop") if "decay" in changes else base
        (loss, params), (loss_2, params_2) = (
            run(reference),
            run(dataclasses.replace(reference, **changes)),
        )
        gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, params_2)
        return abs(float(loss - loss_2)), max(jax.tree.leaves(gaps))

    return compare


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_number_reaches_the_update(sensitivity, change):
    of_loss, of_params = sensitivity(**change)
    assert of_params > 1e-5
    in_the_loss = CHANGES.index(change) < CHANGES.index({"learning_rate": 0.02})
    assert (of_loss > 1e-4) == in_the_loss


def test_gamma_zero_makes_the_target_the_reward(vector_spec, make_batch):
    agent = vtrace.make_agent(vector_spec, dataclasses.replace(SMALL, discount=0.0))
    batch, state = make_batch(agent, vector_spec), jax.jit(agent.init)(KEY)
    # On-policy, so that no ratio below 1 keeps the target from the reward.
    unroll = act(agent, state.params, batch.unrolls.inputs)
    metrics = jax.jit(agent.update)(state, batch._replace(unrolls=unroll), KEY).metrics
    valid = batch.unrolls.inputs.step_type[:, 1:] != FIRST
    expected = batch.unrolls.inputs.reward[:, 1:][valid].mean()
    np.testing.assert_allclose(metrics["target"], expected, atol=1e-5)


def test_learning_rate_goes_linearly_to_its_end(vector_spec, make_batch):
    agent = vtrace.make_agent(
        vector_spec,
        dataclasses.replace(
            SMALL,
            learning_rate=0.4,
            final_learning_rate=0.1,
            schedule_steps=3,
            learning_rate_schedule="linear",
        ),
    )
    batch, update, state = (
        make_batch(agent, vector_spec),
        jax.jit(agent.update),
        jax.jit(agent.init)(KEY),
    )
    rates = []
    for _ in range(5):
        state, metrics, _ = update(state, batch, KEY)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [0.4, 0.3, 0.2, 0.1, 0.1], rtol=1e-5)
    assert state.updates == 5


def test_loss_is_a_weighted_sum_over_the_number_of_valid_transitions(vector_spec, make_batch):
    # A loss that is just the reward. Row 0: rewards 1, 2, 3, of which the second leads to a FIRST
    # step; row 1: rewards 10, 20, 30 with weight .5. (1 + 3 + .5 * 60) / 5 valid ones = 6.8;
    # a mean of means would be (2 + 10) / 2 = 6.
    agent = vtrace.make_agent(
        vector_spec,
        dataclasses.replace(SMALL, unroll_length=3, batch_size=2),
        loss=lambda x: vtrace.SequenceLoss(
            x.reward_t + 0 * x.outputs.value[:-1], x.reward_t, {"mine": x.reward_t}
        ),
    )
    batch = make_batch(agent, vector_spec)
    inputs = batch.unrolls.inputs._replace(
        step_type=np.array([[0, 1, 0, 1], [1, 1, 1, 2]], np.uint8),
        reward=np.array([[9, 1, 2, 3], [9, 10, 20, 30]], np.float32),
    )
    batch = agent_lib.Batch(batch.unrolls._replace(inputs=inputs), np.array([1.0, 0.5], np.float32))
    metrics = jax.jit(agent.update)(jax.jit(agent.init)(KEY), batch, KEY).metrics
    np.testing.assert_allclose(metrics["loss"], 6.8, rtol=1e-6)
    np.testing.assert_allclose(metrics["mine"], 64 / 5, rtol=1e-6)
    assert metrics["valid_transitions"] == 5


def test_a_batch_without_valid_transitions_changes_nothing_but_the_count(vector_spec, make_batch):
    agent = vtrace.make_agent(vector_spec, SMALL)
    batch, state = make_batch(agent, vector_spec), jax.jit(agent.init)(KEY)
    inputs = batch.unrolls.inputs._replace(
        step_type=np.full_like(batch.unrolls.inputs.step_type, FIRST)
    )
    update = jax.jit(agent.update)(
        state, batch._replace(unrolls=batch.unrolls._replace(inputs=inputs)), KEY
    )
    jax.tree.map(np.testing.assert_array_equal, update.state.params, state.params)
    assert all(np.isfinite(x) for x in update.metrics.values())


def test_metrics_are_scalars_and_there_are_no_priorities(vector_spec, make_batch):
    agent = vtrace.make_agent(vector_spec, SMALL)
    update = jax.jit(agent.update)(jax.jit(agent.init)(KEY), make_batch(agent, vector_spec), KEY)
    assert all(x.shape == () for x in update.metrics.values())
    assert set(update.metrics) >= {
        "loss", "policy_loss", "value_loss", "entropy", "gradient_norm", "rho", "rho_clipped",
        "advantage", "learning_rate", "valid_transitions", "explained_variance",
    }  # fmt: skip
    assert update.priorities is None


def test_update_may_be_given_its_state_away(vector_spec, make_batch):
    agent = vtrace.make_agent(vector_spec, dataclasses.replace(SMALL, lstm_size=4))
    batch = make_batch(agent, vector_spec)
    results = []
    for donate in ((), (0,)):
        update, start = jax.jit(agent.update, donate_argnums=donate), jax.jit(agent.init)(KEY)
        state = start
        for _ in range(3):
            state = update(state, batch, KEY).state
        results.append(state)
        assert all(x.is_deleted() == bool(donate) for x in jax.tree.leaves(start))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    ("discount", "first", "last"),
    # One per step, gamma .9. Truncated: the return goes on after the cut, 1 / (1 - .9) = 10 at
    # every step. Terminated: 1 at the tenth step, (1 - .9^10) / (1 - .9) = 6.513 at the first.
    [(1.0, 10.0, 10.0), (0.0, 6.513, 1.0)],
)
def test_values_learnt_are_those_of_truncation_and_termination(make_spec, discount, first, last):
    spec = make_spec(dm_specs.DiscreteArray(10, np.int32), dm_specs.DiscreteArray(2, np.int32))
    config = vtrace.Config(
        unroll_length=20, batch_size=11, discount=0.9, hidden_sizes=(), learning_rate=0.1
    )
    network = vtrace.make_network(spec, config, 2)
    agent = vtrace.make_agent(spec, config, network=network)

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
    extras = {"logits": np.zeros((*place.shape, 2), np.float32)}
    batch = agent_lib.Batch(types.Unroll(inputs, action, extras, (), ()), np.ones(11, np.float32))

    update, state = jax.jit(agent.update), jax.jit(agent.init)(KEY)
    for _ in range(400):
        state = update(state, batch, KEY).state
    outputs, _ = network.step(state.params, jax.tree.map(lambda x: x[0, :10], inputs), ())
    np.testing.assert_allclose([outputs.value[0], outputs.value[9]], [first, last], atol=0.3)


def test_nested_observations_and_actions(make_spec, make_batch):
    spec = make_spec(
        {
            "image": (dm_specs.Array((12, 12, 1), np.uint8),),
            "flag": dm_specs.Array((), np.bool_),
            "place": dm_specs.DiscreteArray(4, np.int32),
        },
        {"move": dm_specs.BoundedArray((2,), np.int32, -1, 1), "fire": dm_specs.DiscreteArray(2)},
    )
    agent = vtrace.make_agent(
        spec,
        dataclasses.replace(
            SMALL,
            torso="mlp",
            lstm_size=4,
            use_previous_action=True,
            compute_dtype="bfloat16",
        ),
    )
    state, batch = jax.jit(agent.init)(KEY), make_batch(agent, spec)
    update = jax.jit(agent.update)(state, batch, KEY)
    assert np.isfinite(update.metrics["loss"])
    assert {x.dtype for x in jax.tree.leaves(update.state.params)} == {jnp.dtype("float32")}
    output = jax.jit(agent.policy.step)(
        state.params,
        jax.random.split(KEY, 4),
        at(batch.unrolls.inputs, 0),
        agent.policy.initial_state(4),
    )
    assert output.action["move"].shape == (4, 2)
    # Three choices for each of two numbers, and two more.
    assert output.extras["logits"].shape == (4, 3 + 3 + 2)
    assert output.extras["logits"].dtype == jnp.float32


def test_a_network_of_ones_own_needs_no_haiku(vector_spec, make_batch):
    def apply(params, inputs, state):
        out = inputs.observation @ params
        return vtrace.PolicyValue(out[..., :3], out[..., 3]), state

    network = networks.Network(lambda key: jnp.zeros((5, 4)), apply, apply, lambda batch: ())
    agent = vtrace.make_agent(vector_spec, SMALL, network=network)
    state = jax.jit(agent.init)(KEY)
    after = jax.jit(agent.update)(state, make_batch(agent, vector_spec), KEY).state
    assert np.all(after.params != state.params)


def test_a_network_of_the_wrong_size_is_refused(vector_spec):
    network = vtrace.make_network(vector_spec, SMALL, 7)
    with pytest.raises(ValueError, match=r"'parameters' must have shape \(1, 3\).*got \(1, 7\)"):
        vtrace.make_agent(vector_spec, SMALL, network=network)


def test_continuous_actions_are_refused(make_spec):
    spec = make_spec(
        dm_specs.Array((2,), np.float32), dm_specs.BoundedArray((2,), np.float32, -1, 1)
    )
    with pytest.raises(ValueError, match=r"action: BoundedArray of dtype float32.*not supported"):
        vtrace.make_agent(spec)


def test_defaults_make_an_agent(vector_spec):
    agent = vtrace.make_agent(vector_spec)
    assert (agent.unroll.length, agent.unroll.window, agent.batch_size) == (20, 21, 32)
    assert agent.replay is None
    assert agent.policy.initial_state(3) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unroll_length", 0),
        ("batch_size", 0),
        ("discount", 1.1),
        ("lambda_", -0.1),
        ("clip_rho", 0.0),
        ("entropy_cost", float("nan")),
        ("learning_rate", float("inf")),
        ("reward_clip", 0.0),
        ("max_gradient_norm", -1.0),
        ("optimizer", "sgd"),
        ("learning_rate_schedule", "cosine"),
        ("torso", "vit"),
        ("hidden_sizes", (64, 0)),
        ("lstm_size", 0),
        ("beta1", 1.0),
        ("schedule_steps", 0),
        ("compute_dtype", "float16"),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=field) as error:
        vtrace.Config(**{field: value})
    assert repr(value) in str(error.value)


def test_a_misspelt_setting_is_an_error():
    with pytest.raises(TypeError, match="entropy_coost"):
        vtrace.Config(entropy_coost=0.1)


# Devices are made when JAX starts, so this runs in a process of its own.
SHARDED_UPDATE = """
import pickle, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from seedlib.agents import vtrace

spec, config, batch = pickle.load(open(sys.argv[1], "rb"))
agent = vtrace.make_agent(spec, config)
results = []
for count in (1, 2, 4, 8):
    mesh = Mesh(np.array(jax.devices()[:count]), ("batch",))
    shared = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(agent.init(jax.random.PRNGKey(0)), whole)
    arguments = state, jax.device_put(batch, shared), jax.random.PRNGKey(1)
    update = jax.jit(agent.update, out_shardings=whole).lower(*arguments).compile()
    new, metrics, _ = update(*arguments)
    # Devices exchange gradients and sums, never frames.
    assert "all-gather" not in update.as_text() and "all-to-all" not in update.as_text(), count
    results.append((jax.tree.leaves(jax.device_get(new.params)), jax.device_get(metrics)))
for params, metrics in results[1:]:
    for a, b in zip(params, results[0][0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, results[0][1][name], atol=1e-4, rtol=1e-4, err_msg=name)
print("same on", len(jax.devices()), "devices")
"""


def test_the_update_does_not_depend_on_how_many_devices_share_the_batch(
    vector_spec, make_batch, tmp_path
):
    config = dataclasses.replace(SMALL, batch_size=16, lstm_size=8)
    agent = vtrace.make_agent(vector_spec, config)
    batch = jax.device_get(make_batch(agent, vector_spec))
    valid = (batch.unrolls.inputs.step_type[:, 1:] != FIRST).sum(axis=1)
    assert len(set(valid.tolist())) > 1  # or a mean of means would be right too
    with open(tmp_path / "batch", "wb") as file:
        pickle.dump((vector_spec, config, batch), file)

    environment = dict(os.environ)
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    environment["JAX_PLATFORMS"] = "cpu"
    environment["PYTHONPATH"] = str(pathlib.Path(seedlib.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", SHARDED_UPDATE, str(tmp_path / "batch")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "same on 8 devices" in result.stdout
