"""The V-trace agent's network: torso, LSTM where wanted, and heads for policy and value."""

from typing import NamedTuple

import haiku as hk
import jax.numpy as jnp

from seedlib import specs, types
from seedlib.agents import networks
from seedlib.agents.vtrace import config as config_lib

# The first policy is close to uniform, so that early data covers every action.
_POLICY_SCALE = 0.01


class PolicyValue(NamedTuple):
    """What an actor-critic network says of a step.

    Attributes:
      parameters: float32 `[..., P]`, the parameters of the action distribution (logits).
      value: float32 `[...]`, the expected discounted return from the step on.
    """

    parameters: types.Array
    value: types.Array


def make_network(
    environment_spec: specs.EnvironmentSpec, config: config_lib.Config, parameter_size: int
) -> networks.Network:
    """Returns the network that a configuration asks for; its outputs are `PolicyValue`.

    Args:
      environment_spec: what the inputs look like.
      config: the agent's settings.
      parameter_size: P, of the action distribution.

    Raises:
      ValueError: where the torso does not fit the observation.
    """
    torso = networks.make_torso(
        environment_spec,
        kind=config.torso,
        hidden_sizes=config.hidden_sizes,
        use_previous_action=config.use_previous_action,
        use_previous_reward=config.use_previous_reward,
        reward_clip=config.reward_clip,
        compute_dtype=config.compute_dtype,
    )

    def head(features: types.Array) -> PolicyValue:
        scaling = hk.initializers.VarianceScaling(_POLICY_SCALE)
        return PolicyValue(
            parameters=hk.Linear(parameter_size, w_init=scaling, name="policy")(features),
            value=jnp.squeeze(hk.Linear(1, name="value")(features), axis=-1),
        )

    return networks.make_network(
        environment_spec, torso, head, config.lstm_size, config.compute_dtype
    )
