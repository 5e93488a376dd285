"""Tests of networks: what the torsos see, when the core resets, and which dtypes come out."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.agents import choices, networks

ACTION = dm_specs.DiscreteArray(3, np.int32)
FIRST, MID = 0, 1


def features(spec, inputs, **kwargs):
    """The torso's features of inputs `[N, ...]`, and its parameters."""
    transformed = hk.without_apply_rng(hk.transform(networks.make_torso(spec, **kwargs)))
    params = transformed.init(jax.random.PRNGKey(0), inputs)
    return transformed.apply(params, inputs), params


def only_steps(inputs, step):
    return jax.tree.map(lambda x: x[:, step], inputs)


def make_network(spec, **kwargs):
    dtype = kwargs.get("compute_dtype", "float32")
    torso = networks.make_torso(spec, hidden_sizes=(8,), compute_dtype=dtype)
    head = lambda x: hk.Linear(2, name="head")(x)  # noqa: PLW0108 - made inside the transform
    return networks.make_network(spec, torso, head, **kwargs)


def test_every_kind_of_leaf_reaches_the_mlp_as_numbers(make_spec, make_inputs):
    spec = make_spec(
        {
            "a": (dm_specs.Array((2,), np.float32), dm_specs.Array((), np.bool_)),
            "b": dm_specs.DiscreteArray(4, np.int32),
            "c": {"pixels": dm_specs.Array((2, 3, 1), np.uint8), "n": dm_specs.Array((1,), "i4")},
            "d": dm_specs.Array((2,), np.uint8),
        },
        ACTION,
    )
    inputs = only_steps(make_inputs(spec, 5, 1), 0)
    o = inputs.observation
    expected = np.concatenate(
        [
            o["a"][0],
            o["a"][1][:, None],
            np.eye(4)[o["b"]],
            # Dicts are walked by sorted key: n before pixels.
            o["c"]["n"],
            o["c"]["pixels"].reshape(5, 6) / 255.0,
            o["d"],
        ],
        axis=-1,
    )
    out, _ = features(spec, inputs, kind="mlp", hidden_sizes=())
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_previous_action_and_reward_are_appended(make_spec, make_inputs):
    spec = make_spec(dm_specs.Array((2,), np.float32), ACTION)
    inputs = only_steps(make_inputs(spec, 3, 1), 0)._replace(
        step_type=np.array([FIRST, MID, MID], np.uint8),
        previous_action=np.array([0, 0, 2], np.int32),
        reward=np.array([0.0, 0.5, -7.0], np.float32),
    )
    out, _ = features(
        spec,
        inputs,
        hidden_sizes=(),
        use_previous_action=True,
        use_previous_reward=True,
        reward_clip=1.0,
    )
    # No action came before a FIRST step: all zeros there, not action 0.
    expected = [[0, 0, 0, 0.0], [1, 0, 0, 0.5], [0, 0, 1, -1.0]]
    np.testing.assert_array_equal(out[:, 2:], expected)


@pytest.mark.parametrize(("kind", "convolutions"), [("shallow", 2), ("deep", 15)])
def test_image_torsos(make_spec, make_inputs, kind, convolutions):
    spec = make_spec(
        {"image": dm_specs.Array((84, 84, 4), np.uint8), "speed": dm_specs.Array((2,), np.float32)},
        ACTION,
    )
    inputs = only_steps(make_inputs(spec, 2, 1), 0)
    out, params = features(spec, inputs, kind=kind)
    assert out.shape == (2, 256 + 2)
    assert sum(leaf.ndim == 4 for leaf in jax.tree.leaves(params)) == convolutions
    np.testing.assert_array_equal(out[:, 256:], inputs.observation["speed"])


def test_small_images_pass_the_shallow_torso(make_spec, make_inputs):
    spec = make_spec(dm_specs.Array((10, 10, 4), np.uint8), ACTION)
    out, _ = features(spec, only_steps(make_inputs(spec, 2, 1), 0), kind="shallow")
    assert out.shape == (2, 256)


def test_default_torso_follows_the_observation(make_spec):
    assert networks.default_torso(dm_specs.Array((84, 84, 4), np.uint8)) == "shallow"
    assert networks.default_torso(dm_specs.Array((84, 84, 4), np.float32)) == "mlp"
    assert networks.default_torso({"x": dm_specs.Array((4,), np.uint8)}) == "mlp"


def test_an_image_torso_without_an_image_is_refused(vector_spec):
    with pytest.raises(ValueError, match=r"'deep' needs an observation of rank 3.*\(5,\)"):
        networks.make_torso(vector_spec, kind="deep")


def test_the_core_starts_afresh_where_a_step_is_first(vector_spec, make_inputs):
    network = make_network(vector_spec, lstm_size=4)
    params = network.init(jax.random.PRNGKey(0))
    # Row 0 has a FIRST step at 3, row 1 has none: [T=6, B=2].
    inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), make_inputs(vector_spec, 2, 6))
    step_type = jnp.full((6, 2), MID, jnp.uint8)
    inputs = inputs._replace(step_type=step_type.at[3, 0].set(FIRST))
    state = jax.tree.map(lambda x: x + 0.7, network.initial_state(2))

    unroll = jax.jit(network.unroll)
    outputs, end = unroll(params, inputs, state)
    tail = jax.tree.map(lambda x: x[3:], inputs)._replace(step_type=step_type[3:])
    fresh, fresh_end = unroll(params, tail, network.initial_state(2))

    np.testing.assert_allclose(outputs[3:, 0], fresh[:, 0], atol=1e-6)
    np.testing.assert_allclose(end[1][0], fresh_end[1][0], atol=1e-6)
    assert np.abs(outputs[3:, 1] - fresh[:, 1]).max() > 1e-3


def test_step_ignores_the_state_where_the_step_is_first(vector_spec, make_inputs):
    network = make_network(vector_spec, lstm_size=4)
    params = network.init(jax.random.PRNGKey(0))
    inputs = only_steps(make_inputs(vector_spec, 2, 1), 0)
    inputs = inputs._replace(step_type=np.array([FIRST, MID], np.uint8))
    zero = network.initial_state(2)
    used = jax.tree.map(lambda x: x + 0.7, zero)
    (from_zero, _), (from_used, _) = (network.step(params, inputs, s) for s in (zero, used))
    np.testing.assert_array_equal(from_zero[0], from_used[0])
    assert np.abs(from_zero[1] - from_used[1]).max() > 1e-3


def test_lstm_follows_its_equations(make_inputs, vector_spec):
    # One unit and one feature: every quantity is a number. Gates in the order update, candidate,
    # forget (+1), output: gate = x * w + h * u + b.
    transformed = hk.without_apply_rng(
        hk.transform(lambda *arguments: networks.ResettingLSTM(1)(*arguments))  # noqa: PLW0108
    )
    w, u, b = np.array([0.3, -0.8, 0.5, 1.1]), np.array([0.2, 0.7, -0.4, 0.6]), 0.1
    params = {"lstm/input": {"w": w[None], "b": np.full(4, b)}, "lstm": {"recurrent": u[None]}}
    x, h, c = np.array([1.5, -0.4]), 0.3, -0.2

    out, (hidden, cell) = transformed.apply(
        jax.tree.map(jnp.float32, params),
        jnp.float32(x)[:, None, None],
        jnp.zeros((2, 1), bool),
        (jnp.full((1, 1), h), jnp.full((1, 1), c)),
    )
    expected = []
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    for value in x:
        i, g, f, o = value * w + h * u + b
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        expected.append(h)

    np.testing.assert_allclose(out[:, 0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose([hidden[0, 0], cell[0, 0]], [h, c], rtol=1e-5)


def test_bfloat16_computes_but_stores_and_answers_float32(vector_spec, make_inputs):
    wide, narrow = (
        make_network(vector_spec, lstm_size=4, compute_dtype=dtype)
        for dtype in choices.COMPUTE_DTYPES
    )
    params = narrow.init(jax.random.PRNGKey(0))
    jax.tree.map(np.testing.assert_array_equal, params, wide.init(jax.random.PRNGKey(0)))
    inputs = only_steps(make_inputs(vector_spec, 3, 1), 0)
    outputs, state = narrow.step(params, inputs, narrow.initial_state(3))
    assert {x.dtype for x in jax.tree.leaves((params, outputs, state))} == {jnp.dtype("float32")}
    exact, _ = wide.step(params, inputs, wide.initial_state(3))
    difference = np.abs(outputs - exact).max()
    assert 0 < difference < 0.05


def test_without_a_core_there_is_no_loop_over_time(vector_spec, make_inputs):
    inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), make_inputs(vector_spec, 2, 6))
    for lstm_size, loops in ((None, 0), (4, 1)):
        network = make_network(vector_spec, lstm_size=lstm_size)
        params = jax.eval_shape(network.init, jax.random.PRNGKey(0))
        jaxpr = jax.make_jaxpr(network.unroll)(params, inputs, network.initial_state(2))
        assert str(jaxpr).count("scan[") == loops
