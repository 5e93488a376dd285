"""Q-learning on sequences, as pure functions of one unbatched sequence.

Kapturowski et al., 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning",
https://openreview.net/forum?id=r1lyTjAqYX. Time: `_tm1` belongs to the step at which an action was
taken, `_t` to the step that it led to. Transition `i` of a sequence of T leads from step `i` to
step `i + 1`; it is valid unless step `i + 1` is FIRST. Steps of a burn-in are no part of these.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import rlax

from seedlib import types


class TemporalDifference(NamedTuple):
    """How far values are from their targets, on the scale of the network's outputs.

    Attributes:
      error_tm1: float32 `[T]`, target minus value; 0, with a gradient of 0, where a transition is
        not valid.
      target_tm1: float32 `[T]`, without gradient. May be anything where not valid.
      value_tm1: float32 `[T]`, of the action taken; 0 where not valid.
    """

    error_tm1: types.Array
    target_tm1: types.Array
    value_tm1: types.Array


def signed_hyperbolic(x: types.Array, epsilon: float = 1e-3) -> types.Array:
    """Returns `h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`, which makes large values small.

    Pohlen et al., 2018, https://arxiv.org/abs/1805.11593. Written without the difference of two
    numbers close to 1, which would leave nothing of a small `x` in float32.
    """
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + epsilon * x


def signed_parabolic(y: types.Array, epsilon: float = 1e-3) -> types.Array:
    """Returns the x with `signed_hyperbolic(x, epsilon) == y`.

    With `u = sqrt(|x| + 1) - 1` that is `epsilon u^2 + (1 + 2 epsilon) u = |y|` and
    `|x| = u (u + 2)`. The root of the quadratic is written as a quotient of sums: as a difference
    (what rlax and the paper have) it is off by some 1e-4 in float32 wherever values are small.
    """
    linear = 1.0 + 2.0 * epsilon
    root = linear + jnp.sqrt(linear**2 + 4.0 * epsilon * jnp.abs(y))
    u_of_y = 2.0 / root
    return y * u_of_y * (jnp.abs(y) * u_of_y + 2.0)


def value_transform(epsilon: float | None) -> rlax.TxPair:
    """Returns `signed_hyperbolic` and its inverse; the identity where epsilon is None."""
    if epsilon is None:
        return rlax.IDENTITY_PAIR
    return rlax.TxPair(
        lambda x: signed_hyperbolic(x, epsilon), lambda y: signed_parabolic(y, epsilon)
    )


def n_step_returns(
    reward_t: types.Array,
    discount_t: types.Array,
    value_t: types.Array,
    valid_t: types.Array,
    n: int,
) -> types.Array:
    """Returns, for each step, n rewards and then the value of the step reached.

    The sum ends sooner, and with the value of the step it ends at, at the end of the sequence and
    at a step from which no valid transition leads (it is LAST, or the episode was broken off
    there). Nothing crosses to the next episode.

    Args:
      reward_t: float32 `[T]`.
      discount_t: float32 `[T]`, gamma included; 0 where an episode terminates.
      value_t: float32 `[T]`, values of the steps reached.
      valid_t: bool `[T]`; elsewhere the others may be anything, and so is what is returned.
      n: at least 1; may be above T.

    Returns:
      float32 `[T]`.
    """
    arrays = [reward_t, discount_t, value_t, valid_t]
    chex.assert_rank(arrays, 1)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, [float, float, float, bool])

    # A row that is not valid pays the value of its own step and carries nothing back: a sum that
    # arrives there has bootstrapped, whether it wanted to or not.
    value_tm1 = jnp.concatenate([jnp.zeros_like(value_t[:1]), value_t[:-1]])
    return rlax.n_step_bootstrapped_returns(
        jnp.where(valid_t, reward_t, value_tm1),
        jnp.where(valid_t, discount_t, 0.0),
        jnp.where(valid_t, value_t, 0.0),
        n,
    )


def n_step_temporal_difference(
    value_tm1: types.Array,
    bootstrap_value_t: types.Array,
    reward_t: types.Array,
    discount_t: types.Array,
    valid_t: types.Array,
    n: int,
    transform: rlax.TxPair = rlax.IDENTITY_PAIR,
) -> TemporalDifference:
    """Returns the errors of values whose scale is `transform`'s.

    Args:
      value_tm1: float32 `[T]`, of the actions taken, transformed.
      bootstrap_value_t: float32 `[T]`, of the steps reached, transformed.
      reward_t: float32 `[T]`, not transformed.
      discount_t: float32 `[T]`, gamma included; 0 where an episode terminates.
      valid_t: bool `[T]`.
      n: see `n_step_returns`.
      transform: of values.
    """
    chex.assert_equal_shape([value_tm1, bootstrap_value_t, valid_t])
    # Masking what goes in, not only what comes out: the gradient of a masked infinity is a NaN.
    value_tm1 = jnp.where(valid_t, value_tm1, 0.0)
    returns = n_step_returns(
        reward_t, discount_t, transform.apply_inv(bootstrap_value_t), valid_t, n
    )
    target_tm1 = jax.lax.stop_gradient(transform.apply(returns))
    return TemporalDifference(
        error_tm1=jnp.where(valid_t, target_tm1 - value_tm1, 0.0),
        target_tm1=target_tm1,
        value_tm1=value_tm1,
    )


def double_q_learning(
    q: types.Array,
    target_q: types.Array,
    action_tm1: types.Array,
    reward_t: types.Array,
    discount_t: types.Array,
    valid_t: types.Array,
    n: int,
    transform: rlax.TxPair = rlax.IDENTITY_PAIR,
) -> TemporalDifference:
    """Returns the errors of n-step double Q-learning (van Hasselt et al., 2015).

    A target bootstraps from the value that the target network gives to the action that the
    online network likes best.

    Args:
      q: float32 `[T+1, A]`, the online network at each step, transformed.
      target_q: float32 `[T+1, A]`, the target network at each step, transformed.
      action_tm1: int `[T]`, 0..A-1.
      reward_t: float32 `[T]`, not transformed.
      discount_t: float32 `[T]`, gamma included; 0 where an episode terminates.
      valid_t: bool `[T]`.
      n: see `n_step_returns`.
      transform: of values.
    """
    chex.assert_rank([q, target_q, action_tm1, valid_t], [2, 2, 1, 1])
    chex.assert_equal_shape([q, target_q])
    chex.assert_axis_dimension(q, 0, valid_t.shape[0] + 1)
    return n_step_temporal_difference(
        rlax.batched_index(q[:-1], action_tm1),
        rlax.batched_index(target_q[1:], jnp.argmax(q[1:], axis=-1)),
        reward_t,
        discount_t,
        valid_t,
        n,
        transform,
    )


def sequence_priority(error_tm1: types.Array, valid_t: types.Array, eta: float) -> types.Array:
    """Returns `eta * max |error| + (1 - eta) * mean |error|` over valid transitions.

    Section 2.3 of the paper. 0 where none is valid: there is nothing to learn.

    Args:
      error_tm1: float32 `[T]`, on the scale of the loss.
      valid_t: bool `[T]`; elsewhere the error may be anything.
      eta: 0..1.
    """
    size_tm1 = jnp.where(valid_t, jnp.abs(error_tm1), 0.0)
    mean = size_tm1.sum() / jnp.maximum(valid_t.sum(), 1)
    return eta * size_tm1.max() + (1.0 - eta) * mean
