"""Tests of V-trace and its loss against numbers worked out by hand and the paper's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.agents import distributions
from seedlib.agents.vtrace import losses

FIRST = 0


def run(value, reward, discount, valid=None, rho=None, **kwargs) -> losses.VTrace:
    """V-trace of lists; `value` has one more entry than the others."""
    valid = [True] * len(reward) if valid is None else valid
    rho = [1.0] * len(reward) if rho is None else rho
    value = jnp.array(value, jnp.float32)
    return losses.vtrace(
        value[:-1],
        value[1:],
        jnp.array(reward, jnp.float32),
        jnp.array(discount, jnp.float32),
        jnp.log(jnp.array(rho, jnp.float32)),
        jnp.array(valid),
        **kwargs,
    )


def test_on_policy_targets_are_discounted_returns():
    # Backwards from the bootstrap 40: 3 + .9*40 = 39; 2 + .9*39 = 37.1; 1 + .9*37.1 = 34.39.
    # Advantages are these minus the values 10, 20, 30.
    result = run([10, 20, 30, 40], [1, 2, 3], [0.9] * 3)
    np.testing.assert_allclose(result.target_tm1, [34.39, 37.1, 39.0], atol=1e-4)
    np.testing.assert_allclose(result.advantage_tm1, [24.39, 17.1, 9.0], atol=1e-4)


def test_off_policy_targets_use_clipped_ratios():
    # Clipped ratios 1, 1, .5. One-step differences: 1+18-10 = 9; 2+27-20 = 9; .5*(3+36-30) = 4.5.
    # vs_2 = 30+4.5 = 34.5; vs_1 = 20+9+.9*1*4.5 = 33.05; vs_0 = 10+9+.9*1*(9+.9*1*4.5) = 30.745.
    # Advantages: 1*(1+.9*33.05-10) = 20.745; 1*(2+.9*34.5-20) = 13.05; .5*(3+.9*40-30) = 4.5.
    result = run([10, 20, 30, 40], [1, 2, 3], [0.9] * 3, rho=[2.0, 1.0, 0.5])
    np.testing.assert_allclose(result.target_tm1, [30.745, 33.05, 34.5], atol=1e-4)
    np.testing.assert_allclose(result.advantage_tm1, [20.745, 13.05, 4.5], atol=1e-4)


def test_termination_stops_the_return():
    # Discount 0 in the middle: vs_1 = 2; vs_0 = 1 + .9*2 = 2.8; vs_2 = 39 as before.
    result = run([10, 20, 30, 40], [1, 2, 3], [0.9, 0.0, 0.9])
    np.testing.assert_allclose(result.target_tm1, [2.8, 2.0, 39.0], atol=1e-4)
    np.testing.assert_allclose(result.advantage_tm1, [-7.2, -18.0, 9.0], atol=1e-4)


def test_a_truncated_episode_bootstraps_from_its_own_last_value_alone():
    # Steps: A0 A1 A2=LAST (values 2, 2, 2), then B0=FIRST B1 B2 (values 50), gamma 1, reward .5.
    # A: vs_1 = .5 + 2 = 2.5, vs_0 = .5 + 2.5 = 3; advantages 3 - 2 = 1 and .5 + 2 - 2 = .5.
    # B: vs_1 = 50.5, vs_0 = 51; advantages 1 and .5. The step A2 is worth its own value, 2.
    both = run([2, 2, 2, 50, 50, 50], [0.5] * 5, [1.0] * 5, valid=[True, True, False, True, True])
    np.testing.assert_allclose(both.target_tm1, [3.0, 2.5, 2.0, 51.0, 50.5], atol=1e-6)
    np.testing.assert_allclose(both.advantage_tm1, [1.0, 0.5, 0.0, 1.0, 0.5], atol=1e-6)

    for value, part in ((2, slice(0, 2)), (50, slice(3, 5))):
        alone = run([value] * 3, [0.5] * 2, [1.0] * 2)
        np.testing.assert_array_equal(alone.target_tm1, both.target_tm1[part])
        np.testing.assert_array_equal(alone.advantage_tm1, both.advantage_tm1[part])


def test_gamma_zero_makes_the_target_the_reward():
    result = run([10, 20, 30, 40], [1, 2, 3], [0.0] * 3)
    np.testing.assert_allclose(result.target_tm1, [1, 2, 3], atol=1e-5)


def vtrace_by_definition(value, reward, discount, rho, valid, lambda_, clip_rho, clip_pg_rho):
    """Equation 1 of the paper, as the sum of products that it is.

    vs_s = V_s + sum_{t >= s} (prod_{s <= i < t} discount_i c_i) * rho_t * (r_t + discount_t V_{t+1}
    - V_t), up to the end of the unroll or the first pair of steps that is no transition.
    """
    steps = len(reward)
    target = np.array(value, np.float64)
    for s in range(steps):
        for t in range(s, steps):
            if not valid[t]:
                break
            product = 1.0
            for i in range(s, t):
                product *= discount[i] * lambda_ * min(1.0, rho[i])
            difference = reward[t] + discount[t] * value[t + 1] - value[t]
            target[s] += product * min(clip_rho, rho[t]) * difference
    advantage = np.zeros(steps)
    for s in range(steps):
        if valid[s]:
            following = lambda_ * target[s + 1] + (1 - lambda_) * value[s + 1]
            advantage[s] = min(clip_pg_rho, rho[s]) * (
                reward[s] + discount[s] * following - value[s]
            )
    return target[:-1], advantage


@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_the_definition_on_random_episodes(make_episodes, seed):
    rng = np.random.default_rng(seed)
    step_type, discount = make_episodes(rng, 13)
    valid = step_type[1:] != FIRST
    discount = 0.95 * discount[1:]
    value, reward = rng.normal(size=13) * 5, rng.normal(size=12)
    rho = np.exp(rng.normal(size=12))
    lambda_ = rng.choice([1.0, 0.7])
    clip_rho, clip_pg_rho = rng.choice([0.5, 1.0, 2.0], size=2)

    target, advantage = vtrace_by_definition(
        value, reward, discount, rho, valid, lambda_, clip_rho, clip_pg_rho
    )
    result = run(
        value,
        reward,
        discount,
        valid,
        rho,
        lambda_=lambda_,
        clip_rho=clip_rho,
        clip_pg_rho=clip_pg_rho,
    )

    np.testing.assert_allclose(result.target_tm1, target, atol=1e-4)
    np.testing.assert_allclose(result.advantage_tm1, advantage, atol=1e-4)


# Logits of two actions that give the first a log-probability of -1.5, or (to float32) of -95.
MINUS_1_5 = [np.log(np.exp(-1.5) / (1 - np.exp(-1.5))), 0.0]
MINUS_95 = [-95.0, 0.0]


def loss_and_gradient(behaviour_rows, valid, learner_rows=None):
    """The summed loss of three transitions, and its gradient by the network's outputs."""
    parameters = [MINUS_1_5] * 4 if learner_rows is None else learner_rows
    distribution = distributions.make_action_distribution(dm_specs.DiscreteArray(2, np.int32))

    def total(parameters, value):
        result = losses.vtrace_loss(
            losses.Transitions(
                outputs=OutputsWithExtraHead(parameters, value),
                behaviour_parameters_tm1=jnp.array(behaviour_rows, jnp.float32),
                action_tm1=jnp.zeros(3, jnp.int32),
                reward_t=jnp.array([1.0, 2.0, 3.0]),
                discount_t=jnp.full(3, 0.9),
                valid_t=jnp.array(valid),
            ),
            distribution,
        )
        return result.loss_tm1.sum(), result

    values = jnp.array([10.0, 20.0, 30.0, 40.0])
    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        jnp.array(parameters, jnp.float32), values
    )


class OutputsWithExtraHead:
    """A network's outputs need the two attributes alone."""

    def __init__(self, parameters, value):
        self.parameters, self.value = parameters, value


@pytest.mark.parametrize("valid", [True, False])
def test_a_ratio_beyond_float32_leaves_loss_and_gradients_finite(valid):
    # The log ratio is -1.5 + 95 = 93.5, and exp(93.5) = 4e40 is above float32's 3.4e38.
    (loss, result), gradients = loss_and_gradient(
        [MINUS_1_5, MINUS_95, MINUS_1_5], [True, valid, True]
    )
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, result)))


def test_a_masked_transition_has_a_gradient_of_exactly_zero():
    (_, result), (by_parameters, by_value) = loss_and_gradient(
        [MINUS_1_5, MINUS_95, MINUS_1_5], [True, False, True]
    )
    assert result.loss_tm1[1] == 0
    np.testing.assert_array_equal(by_parameters[1], 0)
    assert by_value[1] == 0
    assert np.all(by_parameters[np.array([0, 2])] != 0)
    # The last step is bootstrapped from alone.
    np.testing.assert_array_equal(by_parameters[3], 0)
    assert by_value[3] == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_stands_in_a_masked_row_does_not_matter(bad):
    clean = loss_and_gradient([MINUS_1_5] * 3, [True, False, True])
    rows = [MINUS_1_5, [bad, bad], MINUS_1_5]
    dirty = loss_and_gradient(rows, [True, False, True], learner_rows=[*rows, MINUS_1_5])
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_loss_is_the_weighted_sum_of_its_three_terms():
    # On-policy, one valid transition of interest: V = 30, bootstrap 40, reward 3, discount .9:
    # target 39, advantage 9. log pi = -1.5, p = e^-1.5 = .223130:
    # policy 9 * 1.5 = 13.5; value 9^2 / 2 = 40.5;
    # entropy 1.5*.223130 - .776870*ln(.776870) = .334695 + .196146 = .530841.
    # Loss = 13.5 + .5*40.5 - .01*.530841 = 33.744692.
    (_, result), _ = loss_and_gradient([MINUS_1_5] * 3, [False, False, True])
    np.testing.assert_allclose(result.metrics["policy_loss"][2], 13.5, rtol=1e-5)
    np.testing.assert_allclose(result.metrics["value_loss"][2], 40.5, rtol=1e-5)
    np.testing.assert_allclose(result.metrics["entropy"][2], 0.530841, rtol=1e-5)
    np.testing.assert_allclose(result.loss_tm1, [0, 0, 33.744692], rtol=1e-5)
