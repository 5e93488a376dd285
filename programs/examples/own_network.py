"""A network of one's own for the V-trace agent: a Haiku torso and head.

python -m programs.seed --env=catch --agent=programs.examples.own_network:make_agent \
    --num_steps=30000 --logdir=runs/own_network
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from seedlib import specs, types
from seedlib.agents import agent, distributions, networks, vtrace


def make_agent(
    environment_spec: specs.EnvironmentSpec, width: int = 128, **options: Any
) -> agent.Agent:
    """Returns the agent; `--agent_option=width=64` and the settings of V-trace arrive here."""
    actions = distributions.make_action_distribution(environment_spec.actions)

    def torso(inputs: types.PolicyInput) -> types.Array:  # [N, ...] -> [N, width]
        x = hk.Flatten()(inputs.observation.astype(jnp.float32))
        x = hk.LayerNorm(-1, True, True)(hk.Linear(width, name="own")(x))
        return jax.nn.silu(x)

    def head(features: types.Array) -> vtrace.PolicyValue:  # [N, width] -> [N, P] and [N]
        return vtrace.PolicyValue(
            parameters=hk.Linear(actions.parameter_size, name="policy")(features),
            value=hk.Linear(1, name="value")(features)[:, 0],
        )

    network = networks.make_network(environment_spec, torso, head)  # lstm_size=64 puts one between
    return vtrace.make_agent(environment_spec, vtrace.Config(**options), network=network)
