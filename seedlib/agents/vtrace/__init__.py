"""V-trace: the off-policy actor-critic of IMPALA and SEED RL, learning each unroll once.

Espeholt et al., 2018, https://arxiv.org/abs/1802.01561.
"""

from seedlib.agents.vtrace.agent import TrainingState, make_agent
from seedlib.agents.vtrace.config import Config
from seedlib.agents.vtrace.losses import (
    Loss,
    SequenceLoss,
    Transitions,
    VTrace,
    vtrace,
    vtrace_loss,
)
from seedlib.agents.vtrace.networks import PolicyValue, make_network

__all__ = [
    "Config",
    "Loss",
    "PolicyValue",
    "SequenceLoss",
    "TrainingState",
    "Transitions",
    "VTrace",
    "make_agent",
    "make_network",
    "vtrace",
    "vtrace_loss",
]
