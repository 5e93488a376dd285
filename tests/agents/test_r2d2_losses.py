"""Tests of Q-learning on sequences against numbers worked out by hand and the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from seedlib.agents.r2d2 import losses

FIRST = 0


def h(x, epsilon=1e-3):
    """The rescaling as the paper has it, in float64."""
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def h_inverse(y, epsilon=1e-3):
    """Proposition A.2 of https://arxiv.org/abs/1805.11593, in float64."""
    root = np.sqrt(1 + 4 * epsilon * (np.abs(y) + 1 + epsilon))
    return np.sign(y) * (((root - 1) / (2 * epsilon)) ** 2 - 1)


SIZES = np.concatenate([[0.0], np.logspace(-8, 6, 200)])
VALUES = np.concatenate([-SIZES[::-1], SIZES])


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0])
def test_rescaling_is_the_papers(epsilon):
    expected = h(VALUES, epsilon)
    result = losses.signed_hyperbolic(jnp.array(VALUES, jnp.float32), epsilon)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-15)
    inverse = losses.signed_parabolic(jnp.array(expected, jnp.float32), epsilon)
    np.testing.assert_allclose(inverse, VALUES, rtol=2e-6, atol=1e-15)
    # The oracle's own inverse is right where float64 leaves it enough digits.
    large = np.abs(VALUES) > 1e-3
    np.testing.assert_allclose(h_inverse(expected, epsilon)[large], VALUES[large], rtol=1e-6)


def test_rescaling_round_trip_is_exact_to_float32_near_zero():
    x = jnp.array(VALUES, jnp.float32)
    there_and_back = losses.signed_parabolic(losses.signed_hyperbolic(x))
    np.testing.assert_allclose(there_and_back, x, rtol=2e-6, atol=0)
    back_and_there = losses.signed_hyperbolic(losses.signed_parabolic(x))
    np.testing.assert_allclose(back_and_there, x, rtol=2e-6, atol=0)


def test_the_inverse_of_rlax_is_not_exact_near_zero():
    # Why there is one of our own. A value of .001 comes back wrong by more than a hundredth of it.
    x = jnp.array([1e-3, 3e-4, 1e-4], jnp.float32)
    theirs = rlax.signed_parabolic(rlax.signed_hyperbolic(x))
    ours = losses.signed_parabolic(losses.signed_hyperbolic(x))
    assert np.max(np.abs(theirs - x) / x) > 1e-2
    assert np.max(np.abs(ours - x) / x) < 1e-6


def test_rescaling_has_gradients_everywhere():
    for function in (losses.signed_hyperbolic, losses.signed_parabolic):
        slope = jax.vmap(jax.grad(function))(jnp.array([-4.0, -1e-6, 0.0, 1e-6, 4.0]))
        assert np.all(np.isfinite(slope)) and np.all(slope > 0)
    # h'(0) = 1/2 + epsilon.
    np.testing.assert_allclose(jax.grad(losses.signed_hyperbolic)(0.0), 0.501, rtol=1e-6)


def test_no_epsilon_means_no_rescaling():
    pair = losses.value_transform(None)
    assert pair.apply(3.0) == pair.apply_inv(3.0) == 3.0
    pair = losses.value_transform(1e-3)
    np.testing.assert_allclose(pair.apply(3.0), 1.003, rtol=1e-6)  # sqrt(4) - 1 + .003
    np.testing.assert_allclose(pair.apply_inv(1.003), 3.0, rtol=1e-6)


def returns(reward, discount, value, n, valid=None):
    valid = [True] * len(reward) if valid is None else valid
    floats = [jnp.array(x, jnp.float32) for x in (reward, discount, value)]
    return losses.n_step_returns(*floats, jnp.array(valid), n)


def test_n_step_sums_keep_the_terminal_reward():
    # n = 3, gamma = .5, five rewards of 1, terminal at the end: 1; 1 + .5; 1 + .5 + .25.
    result = returns([1] * 5, [0.5] * 4 + [0.0], [9] * 5, n=3)
    np.testing.assert_allclose(result[2:], [1.75, 1.5, 1.0], atol=1e-6)
    # The first two bootstrap from the steps 3 and 4: 1.75 + .125 * 9.
    np.testing.assert_allclose(result[:2], [2.875] * 2, atol=1e-6)


def test_n_step_sums_bootstrap_at_a_truncation():
    # The same with a final value of 8: 1.75 + 8/8; 1.5 + 8/4; 1 + 8/2.
    alone = returns([1] * 5, [0.5] * 5, [0, 0, 0, 0, 8], n=3)
    np.testing.assert_allclose(alone[2:], [2.75, 3.5, 5.0], atol=1e-6)

    # And in the middle of a sequence, with another episode after it that pays 100.
    valid = [True] * 5 + [False] + [True] * 2
    both = returns([1] * 5 + [0] + [100] * 2, [0.5] * 8, [0, 0, 0, 0, 8] + [700] * 3, 3, valid)
    np.testing.assert_array_equal(both[:5], alone)
    # 100 + 50 + .25 * 700; 100 + .5 * 700.
    np.testing.assert_allclose(both[6:], [325, 450], rtol=1e-6)


def test_rewards_of_two_environments_never_mix():
    reward = jnp.array([[1.0] * 6, [100.0] * 6])
    rest = [jnp.full((2, 6), x) for x in (0.5, 0.0, True)]
    rest[2] = rest[2].astype(bool)
    result = jax.vmap(lambda *x: losses.n_step_returns(*x, 3))(reward, *rest)
    np.testing.assert_allclose(result[0, :4], 1.75, rtol=1e-6)
    np.testing.assert_allclose(result[1], 100 * result[0], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_gamma_zero_makes_the_return_the_reward(n):
    np.testing.assert_array_equal(returns([1, 2, 3], [0] * 3, [10, 20, 30], n), [1, 2, 3])


def learn(q, target_q, action, reward, discount, n=1, epsilon=None, valid=None):
    valid = [True] * len(reward) if valid is None else valid
    return losses.double_q_learning(
        jnp.array(q, jnp.float32),
        jnp.array(target_q, jnp.float32),
        jnp.array(action),
        jnp.array(reward, jnp.float32),
        jnp.array(discount, jnp.float32),
        jnp.array(valid),
        n,
        losses.value_transform(epsilon),
    )


def test_target_is_of_the_step_reached():
    # 1 + .9 * 10; with the values of the step itself it would be 1 + .9 * 2 = 2.8.
    q = [[1, 2], [0, 10]]
    result = learn(q, q, [0], [1], [0.9])
    np.testing.assert_allclose(result.target_tm1, [10.0], rtol=1e-6)
    np.testing.assert_allclose(result.error_tm1, [9.0], rtol=1e-6)
    np.testing.assert_allclose(result.value_tm1, [1.0], rtol=1e-6)


def test_the_online_network_chooses_and_the_target_network_values():
    # Online likes action 1, which is worth 3 to the target network: 1 + .9 * 3. Its own best is
    # 5 (5.5), online's value of it 10 (10), and online's value of target's choice 0 (1).
    result = learn([[1, 2], [0, 10]], [[7, 7], [5, 3]], [1], [1], [0.9])
    np.testing.assert_allclose(result.target_tm1, [3.7], rtol=1e-6)
    np.testing.assert_allclose(result.error_tm1, [1.7], rtol=1e-6)


def test_targets_undo_the_rescaling_first():
    # h(100) = 9.14987562, and h(5 + .997^5 * 100) = 9.32647. Without undoing h first: 14.013.
    next_q = 9.14987562
    q = [[0.0]] * 5 + [[next_q]]
    result = learn(q, q, [0] * 5, [5, 0, 0, 0, 0], [0.997] * 5, n=5, epsilon=1e-3)
    np.testing.assert_allclose(result.target_tm1[0], 9.32647, atol=2e-5)
    np.testing.assert_allclose(result.error_tm1[0], 9.32647, atol=2e-5)
    plain = learn(q, q, [0] * 5, [5, 0, 0, 0, 0], [0.997] * 5, n=5)
    np.testing.assert_allclose(plain.target_tm1[0], 14.013, atol=1e-3)


def targets_by_definition(q, target_q, reward, discount, step_type, n, epsilon):
    """Each target as its own walk forward; step `i + 1` holds the reward of transition `i`.

    From step s, collect rewards until n are collected, the sequence ends, or the next step begins
    another episode; then add the value of the step arrived at, as far as discounts leave any of it.
    """
    there, back = (h, h_inverse) if epsilon else (lambda x: x, lambda x: x)
    last_step = len(step_type) - 1
    targets = {}
    for start in range(last_step):
        if step_type[start + 1] == FIRST:
            continue
        total, left, step = 0.0, 1.0, start
        while step - start < n and step < last_step and step_type[step + 1] != FIRST:
            step += 1
            total += left * reward[step]
            left *= discount[step]
        best = int(np.argmax(q[step]))
        targets[start] = there(total + left * back(target_q[step, best]))
    return targets


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 20])
@pytest.mark.parametrize("seed", range(8))
def test_targets_agree_with_the_definition_on_random_episodes(make_episodes, seed, n):
    rng = np.random.default_rng(seed)
    epsilon = rng.choice([0.0, 1e-3])
    step_type, discount = make_episodes(rng, 13)
    discount = (0.95 * discount).astype(np.float32)
    reward = rng.normal(size=13) * 5
    q, target_q = rng.normal(size=(2, 13, 3)) * 4
    action = rng.integers(0, 3, 12)
    valid = step_type[1:] != FIRST

    expected = targets_by_definition(q, target_q, reward, discount, step_type, n, epsilon)
    result = learn(q, target_q, action, reward[1:], discount[1:], n, epsilon or None, valid)

    assert sorted(expected) == np.flatnonzero(valid).tolist()
    for start, target in expected.items():
        np.testing.assert_allclose(result.target_tm1[start], target, atol=1e-4)
        error = target - q[start, action[start]]
        np.testing.assert_allclose(result.error_tm1[start], error, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(result.error_tm1)[~valid], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_stands_in_a_row_that_is_no_transition_does_not_matter(bad):
    valid = [True, True, False, True, True]
    q = np.arange(12.0).reshape(6, 2)

    def loss(q, reward, discount):
        result = losses.double_q_learning(
            q,
            jax.lax.stop_gradient(q),
            jnp.zeros(5, jnp.int32),
            reward,
            discount,
            jnp.array(valid),
            3,
            losses.value_transform(1e-3),
        )
        priority = losses.sequence_priority(result.error_tm1, jnp.array(valid), 0.9)
        return jnp.square(result.error_tm1).sum(), (result.error_tm1, priority)

    def run(paid):
        reward = jnp.array([1.0, 2.0, paid, 3.0, 4.0])
        discount = jnp.array([0.9, 0.9, paid, 0.9, 0.9])
        return jax.value_and_grad(loss, has_aux=True)(jnp.array(q, jnp.float32), reward, discount)

    jax.tree.map(np.testing.assert_array_equal, run(bad), run(0.0))
    (_, (error, _)), gradient = run(bad)
    assert np.isfinite(error).all() and error[2] == 0
    np.testing.assert_array_equal(gradient[2], 0)
    # The last step is bootstrapped from alone, and targets have no gradient.
    np.testing.assert_array_equal(gradient[5], 0)
    assert np.all(gradient[np.array([0, 1, 3, 4]), 0] != 0)


def test_priority_mixes_largest_and_mean_error():
    # .9 * 4 + .1 * (1 + 4 + 0 + 3) / 4 = 3.8, whatever the signs.
    valid = jnp.ones(4, bool)
    for errors in ([1, 4, 0, 3], [-1, 4, 0, -3], [1, -4, 0, 3]):
        priority = losses.sequence_priority(jnp.array(errors, jnp.float32), valid, 0.9)
        np.testing.assert_allclose(priority, 3.8, rtol=1e-6)


@pytest.mark.parametrize("padding", [1000.0, -1000.0, np.nan, np.inf])
def test_priority_does_not_see_rows_that_are_no_transitions(padding):
    error = jnp.array([1, padding, 4, 0, 3, padding], jnp.float32)
    valid = jnp.array([True, False, True, True, True, False])
    np.testing.assert_allclose(losses.sequence_priority(error, valid, 0.9), 3.8, rtol=1e-6)


def test_a_sequence_without_transitions_has_priority_zero():
    priority = losses.sequence_priority(jnp.full(3, jnp.nan), jnp.zeros(3, bool), 0.9)
    assert priority == 0


def test_inputs_of_the_wrong_shape_are_refused():
    with pytest.raises(AssertionError):
        learn([[1, 2], [3, 4]], [[1, 2], [3, 4]], [0, 1], [1, 2], [0.9, 0.9])
    with pytest.raises(AssertionError):
        returns([1, 2], [0.9], [1, 2], 1)
