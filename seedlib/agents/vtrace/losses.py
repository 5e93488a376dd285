"""V-trace and the actor-critic loss on it, as pure functions of one unbatched sequence.

Espeholt et al., 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", https://arxiv.org/abs/1802.01561. Time: `_tm1` belongs to the step at which an
action was taken, `_t` to the step that it led to. Transition `i` of a sequence of T leads from step
`i` to step `i + 1`; it is valid unless step `i + 1` is FIRST.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import rlax

from seedlib import types
from seedlib.agents import distributions

_LOG_RHO_LIMIT = 20.0


class Transitions(NamedTuple):
    """T transitions of one unroll, as a loss sees them.

    Attributes:
      outputs: the learner's network at each of the T+1 steps; has `parameters` `[T+1, P]` and
        `value` `[T+1]`, as `vtrace.PolicyValue` does.
      behaviour_parameters_tm1: float32 `[T, P]`, of the distribution that the action came from.
      action_tm1: nested arrays `[T, ...]`.
      reward_t: float32 `[T]`, scaled and clipped.
      discount_t: float32 `[T]`, gamma times the environment's own discount.
      valid_t: bool `[T]`, false where this is no transition.
    """

    outputs: Any
    behaviour_parameters_tm1: types.Array
    action_tm1: types.Nested
    reward_t: types.Array
    discount_t: types.Array
    valid_t: types.Array


class SequenceLoss(NamedTuple):
    """A loss, transition by transition; values in rows that are not valid are not read.

    Attributes:
      loss_tm1: float32 `[T]`.
      target_tm1: float32 `[T]`, what the value at each step was drawn towards.
      metrics: a flat dict of float32 `[T]`, reported as means over valid transitions.
    """

    loss_tm1: types.Array
    target_tm1: types.Array
    metrics: dict[str, types.Array]


Loss = Callable[[Transitions], SequenceLoss]
"""What an agent minimises the mean of, over the valid transitions of a batch."""


class VTrace(NamedTuple):
    """What V-trace makes of a sequence; no gradient flows through it.

    Attributes:
      target_tm1: float32 `[T]`, `vs` in the paper: the corrected return from each step. Where a
        transition is not valid, the value of the step itself.
      advantage_tm1: float32 `[T]`, weights of the policy gradient, ratio included. 0 where a
        transition is not valid.
      rho_tm1: float32 `[T]`, importance ratios before clipping. 1 where a transition is not valid.
    """

    target_tm1: types.Array
    advantage_tm1: types.Array
    rho_tm1: types.Array


def vtrace(
    value_tm1: types.Array,
    value_t: types.Array,
    reward_t: types.Array,
    discount_t: types.Array,
    log_rho_tm1: types.Array,
    valid_t: types.Array,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """Returns V-trace targets and advantages of a sequence that may hold several episodes.

    A step from which no valid transition leads (it is LAST, or the episode was broken off there)
    is worth its own value: the transition before it bootstraps from that value as far as its
    discount lets it, and nothing crosses to the next episode.

    Args:
      value_tm1: float32 `[T]`, values of the steps acted in.
      value_t: float32 `[T]`, values of the steps reached.
      reward_t: float32 `[T]`.
      discount_t: float32 `[T]`, gamma included; 0 where an episode terminates.
      log_rho_tm1: float32 `[T]`, log of the importance ratio. May be anything where not valid.
      valid_t: bool `[T]`.
      lambda_: mixes multi-step and one-step targets. Advantages bootstrap from the same mixture.
      clip_rho: rho-bar of the paper. (c-bar is 1, as rlax has it.)
      clip_pg_rho: clips the ratio that weights the policy gradient.
    """
    arrays = [value_tm1, value_t, reward_t, discount_t, log_rho_tm1, valid_t]
    chex.assert_rank(arrays, 1)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, [float, float, float, float, float, bool])

    # A row that is not valid becomes one whose temporal difference is exactly 0 and which carries
    # nothing back. Its ratio is replaced before `exp`, and every other ratio is kept far from
    # overflow: an infinite one would turn a difference of 0 into a NaN.
    log_rho_tm1 = jnp.where(valid_t, log_rho_tm1, 0.0)
    rho_tm1 = jnp.exp(jnp.clip(log_rho_tm1, -_LOG_RHO_LIMIT, _LOG_RHO_LIMIT))
    reward_t = jnp.where(valid_t, reward_t, value_tm1)
    discount_t = jnp.where(valid_t, discount_t, 0.0)

    result = rlax.vtrace_td_error_and_advantage(
        value_tm1,
        value_t,
        reward_t,
        discount_t,
        rho_tm1,
        lambda_=lambda_,
        clip_rho_threshold=clip_rho,
        clip_pg_rho_threshold=clip_pg_rho,
    )
    return jax.lax.stop_gradient(
        VTrace(
            target_tm1=value_tm1 + result.errors,
            advantage_tm1=result.pg_advantage,
            rho_tm1=rho_tm1,
        )
    )


def vtrace_loss(
    transitions: Transitions,
    distribution: distributions.ActionDistribution,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
    entropy_cost: float = 0.01,
    baseline_cost: float = 0.5,
) -> SequenceLoss:
    """Returns the loss of IMPALA (section 4.2): policy gradient, value error and entropy.

    `loss = -advantage * log pi(action) + baseline_cost * (target - value)^2 / 2
    - entropy_cost * entropy`, and 0, with a gradient of exactly 0, where a transition is not valid.

    Args:
      transitions: one sequence.
      distribution: what the parameters mean.
      lambda_: see `vtrace`.
      clip_rho: see `vtrace`.
      clip_pg_rho: see `vtrace`.
      entropy_cost: weight of the entropy bonus.
      baseline_cost: weight of the value loss.
    """
    outputs, valid_t = transitions.outputs, transitions.valid_t
    chex.assert_rank([outputs.parameters, outputs.value, valid_t], [2, 1, 1])
    chex.assert_axis_dimension(outputs.value, 0, valid_t.shape[0] + 1)

    # Masking what goes in, not only what comes out: the gradient of a masked infinity is a NaN.
    masked = lambda x: jnp.where(valid_t[:, None], x, 0.0)
    parameters_tm1 = masked(outputs.parameters[:-1])
    behaviour_parameters_tm1 = masked(transitions.behaviour_parameters_tm1)
    value_tm1 = outputs.value[:-1]

    log_prob_tm1 = distribution.log_prob(parameters_tm1, transitions.action_tm1)
    behaviour_log_prob_tm1 = distribution.log_prob(behaviour_parameters_tm1, transitions.action_tm1)
    returns = vtrace(
        value_tm1,
        outputs.value[1:],
        transitions.reward_t,
        transitions.discount_t,
        jax.lax.stop_gradient(log_prob_tm1 - behaviour_log_prob_tm1),
        valid_t,
        lambda_=lambda_,
        clip_rho=clip_rho,
        clip_pg_rho=clip_pg_rho,
    )
    policy_loss_tm1 = -returns.advantage_tm1 * log_prob_tm1
    value_loss_tm1 = 0.5 * jnp.square(returns.target_tm1 - value_tm1)
    entropy_tm1 = distribution.entropy(parameters_tm1)
    loss_tm1 = policy_loss_tm1 + baseline_cost * value_loss_tm1 - entropy_cost * entropy_tm1
    return SequenceLoss(
        loss_tm1=jnp.where(valid_t, loss_tm1, 0.0),
        target_tm1=returns.target_tm1,
        metrics={
            "policy_loss": policy_loss_tm1,
            "value_loss": value_loss_tm1,
            "entropy": entropy_tm1,
            "advantage": returns.advantage_tm1,
            "rho": returns.rho_tm1,
            "rho_clipped": (returns.rho_tm1 > clip_rho).astype(jnp.float32),
        },
    )
