"""A loss of one's own for the V-trace agent: V-trace, and a pull back to the behaviour policy.

python -m programs.seed --env=catch --agent=programs.examples.own_loss:make_agent \
    --num_steps=30000 --logdir=runs/own_loss
"""

from typing import Any

import distrax

from seedlib import specs
from seedlib.agents import agent, distributions, vtrace


def make_agent(
    environment_spec: specs.EnvironmentSpec, kl_cost: float = 0.1, **options: Any
) -> agent.Agent:
    """Returns the agent; `--agent_option=kl_cost=1` and the settings of V-trace arrive here."""
    actions = distributions.make_action_distribution(environment_spec.actions)

    # A pure function of one unroll of T transitions; the agent takes it over the batch, and the
    # mean over the valid transitions. What `metrics` holds appears in train.csv.
    def loss(transitions: vtrace.Transitions) -> vtrace.SequenceLoss:
        base = vtrace.vtrace_loss(transitions, actions)
        behaviour = distrax.Categorical(transitions.behaviour_parameters_tm1)  # [T, P]
        learner = distrax.Categorical(transitions.outputs.parameters[:-1])  # [T, P]
        kl = behaviour.kl_divergence(learner)  # [T]
        return base._replace(
            loss_tm1=base.loss_tm1 + kl_cost * kl, metrics={**base.metrics, "kl": kl}
        )

    return vtrace.make_agent(environment_spec, vtrace.Config(**options), loss=loss)
