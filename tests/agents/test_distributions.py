"""Tests of action distributions against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.agents import distributions

DISCRETE = dm_specs.DiscreteArray(3, np.int32)
# Two numbers, one of -1, 0 and one of 5, 6, 7.
VECTOR = dm_specs.BoundedArray((2,), np.int32, [-1, 5], [0, 7])


def keys(count, seed=0):
    return jax.random.split(jax.random.PRNGKey(seed), count)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())


def test_log_prob_and_entropy_of_a_discrete_action():
    distribution = distributions.make_action_distribution(DISCRETE)
    logits = np.array([0.5, -1.0, 2.0], np.float32)
    expected = log_softmax(logits)
    assert distribution.parameter_size == 3
    np.testing.assert_allclose(distribution.log_prob(logits, jnp.int32(1)), expected[1], rtol=1e-6)
    np.testing.assert_allclose(
        distribution.entropy(logits), -(np.exp(expected) * expected).sum(), rtol=1e-6
    )
    assert distribution.mode(logits) == 2


def test_a_vector_of_integers_is_a_product_of_choices():
    distribution = distributions.make_action_distribution(VECTOR)
    logits = np.array([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)
    first, second = log_softmax(logits[:2]), log_softmax(logits[2:])
    assert distribution.parameter_size == 5
    # The action (0, 5) is choice 1 of the first number and choice 0 of the second.
    np.testing.assert_allclose(
        distribution.log_prob(logits, jnp.array([0, 5])), first[1] + second[0], rtol=1e-6
    )
    entropy = -(np.exp(first) * first).sum() - (np.exp(second) * second).sum()
    np.testing.assert_allclose(distribution.entropy(logits), entropy, rtol=1e-6)
    np.testing.assert_array_equal(distribution.mode(logits), [-1, 5])


def test_actions_have_the_structure_dtype_and_bounds_of_the_spec():
    spec = {"move": VECTOR, "fire": DISCRETE}
    distribution = distributions.make_action_distribution(spec)
    action = distribution.sample(keys(200), jnp.zeros((200, 8)))
    assert action["move"].shape == (200, 2)
    assert action["fire"].shape == (200,)
    assert action["move"].dtype == action["fire"].dtype == jnp.int32
    assert set(map(tuple, np.asarray(action["move"]))) == {
        (a, b) for a in (-1, 0) for b in (5, 6, 7)
    }
    assert set(np.asarray(action["fire"]).tolist()) == {0, 1, 2}


def test_samples_follow_the_probabilities():
    # Of 20000 draws with p = .7 the share has a standard deviation of .0032.
    distribution = distributions.make_action_distribution(DISCRETE)
    logits = jnp.log(jnp.array([0.7, 0.2, 0.1]))
    action = distribution.sample(keys(20_000), jnp.tile(logits, (20_000, 1)))
    share = np.bincount(action, minlength=3) / 20_000
    np.testing.assert_allclose(share, [0.7, 0.2, 0.1], atol=0.015)


@pytest.mark.parametrize(
    "spec",
    [
        dm_specs.Array((2,), np.float32),
        dm_specs.BoundedArray((2,), np.float32, -1, 1),
        dm_specs.Array((), np.int32),
        dm_specs.BoundedArray((), np.int32, 0, 2**20),
        {},
    ],
)
def test_other_actions_are_refused_in_one_line(spec):
    with pytest.raises(ValueError, match="action") as error:
        distributions.make_action_distribution(spec)
    assert "\n" not in str(error.value)
