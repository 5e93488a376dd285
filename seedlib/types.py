"""The values that cross room borders: nested arrays and the named tuples made of them.

Leaves are NumPy arrays on hosts and JAX arrays on devices; both are `Array` here, so that this
module imports neither JAX nor Reverb. `B` is a batch of environments (or unrolls), `L` the steps of
an unroll (`burn_in + T + 1`), `...` the shape of a leaf in its spec.
"""

from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A `numpy.ndarray` or a `jax.Array`."""

Nested = Any
"""A leaf, or a dict, tuple, list or named tuple of `Nested` (what `dm-tree` and JAX both walk)."""


class PolicyInput(NamedTuple):
    """What a policy sees at one step. Leaves `[B, ...]`; in an unroll `[L, ...]` or `[B, L, ...]`.

    The time step follows dm_env: a LAST step carries the true final observation, its reward, and
    discount 0 (termination) or above 0 (truncation); the action answered to it is ignored, and the
    next step is FIRST. The transition LAST -> FIRST is not a transition.

    Attributes:
      step_type: uint8, a `dm_env.StepType` value (0 FIRST, 1 MID, 2 LAST).
      reward: float32, unclipped; 0 on a FIRST step.
      discount: float32, the environment's own (agents multiply it by gamma); 1 on a FIRST step.
      observation: nested arrays, as the environment's observation spec says.
      previous_action: nested arrays, as the action spec says; zeros on a FIRST step.
      environment_id: int32, unique among the environments of a run.
      evaluate: bool, true for environments whose data never reaches training.
    """

    step_type: Array
    reward: Array
    discount: Array
    observation: Nested
    previous_action: Nested
    environment_id: Array
    evaluate: Array


class PolicyOutput(NamedTuple):
    """What a policy answers for one step. Leaves `[B, ...]`.

    Attributes:
      action: nested arrays, as the action spec says.
      extras: nested arrays that the learner needs of the moment of acting (for example
        behaviour logits); stored per step.
      state: the recurrent state after the step; `()` for a policy without one.
    """

    action: Nested
    extras: Nested
    state: Nested


class UnrollInfo(NamedTuple):
    """Where an unroll comes from. Host arrays `[L]` (or `[B, L]`), never moved to a device.

    Attributes:
      policy_version: int64, the learner's update count of the parameters that chose the action.
      step_index: int64, steps of this environment since its incarnation began, from 0.
      incarnation: int64, how often this environment had been (re)connected before, from 0.
    """

    policy_version: np.ndarray
    step_index: np.ndarray
    incarnation: np.ndarray


class Unroll(NamedTuple):
    """`L` consecutive steps of one environment. Leaves `[L, ...]`, batched `[B, L, ...]`.

    Attributes:
      inputs: what the policy saw at each step.
      action: what it answered at each step. The answer to a LAST step was ignored.
      extras: the policy's extras at each step.
      initial_state: the recurrent state *before* the first step, `[...]`, batched `[B, ...]`;
        the initial state where the first step is FIRST.
      info: an `UnrollInfo` on hosts; `()` where the unroll lies on a device.
    """

    inputs: PolicyInput
    action: Nested
    extras: Nested
    initial_state: Nested
    info: Any
