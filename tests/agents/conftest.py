"""Environment specs and random but lawful unrolls for the tests of agents."""

from collections.abc import Callable

import acme.specs
import jax
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from seedlib import specs, types
from seedlib.agents import agent as agent_lib

FIRST, MID, LAST = 0, 1, 2


def _make_spec(observations: types.Nested, actions: types.Nested) -> specs.EnvironmentSpec:
    return acme.specs.EnvironmentSpec(
        observations=observations,
        actions=actions,
        rewards=dm_specs.Array((), np.float32),
        discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
    )


def _episodes(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Step types and discounts `[L]`: terminations, truncations, and episodes broken off."""
    step_types, discounts = [], []
    step_type = rng.choice([FIRST, MID])
    for _ in range(length):
        step_types.append(step_type)
        discounts.append(1.0)
        if step_type == LAST:
            discounts[-1] = rng.choice([0.0, 1.0])
            step_type = FIRST
        else:
            step_type = rng.choice([MID, LAST, FIRST], p=[0.65, 0.25, 0.1])
    return np.array(step_types, np.uint8), np.array(discounts, np.float32)


def _random_leaf(rng: np.random.Generator, spec: dm_specs.Array, leading: tuple[int, ...]):
    shape = leading + tuple(spec.shape)
    if isinstance(spec, dm_specs.BoundedArray) and np.issubdtype(spec.dtype, np.integer):
        return rng.integers(spec.minimum, spec.maximum + 1, shape).astype(spec.dtype)
    if spec.dtype == np.bool_:
        return rng.random(shape) < 0.5
    if np.issubdtype(spec.dtype, np.integer):
        return rng.integers(0, 100, shape).astype(spec.dtype)
    return rng.normal(size=shape).astype(spec.dtype)


def _make_inputs(
    spec: specs.EnvironmentSpec, batch: int, length: int, seed: int = 0
) -> types.PolicyInput:
    rng = np.random.default_rng(seed)
    episodes = [_episodes(rng, length) for _ in range(batch)]
    step_type, discount = map(np.stack, zip(*episodes, strict=True))
    draw = lambda leaf: _random_leaf(rng, leaf, (batch, length))
    return types.PolicyInput(
        step_type=step_type,
        reward=np.where(step_type == FIRST, 0, rng.normal(size=step_type.shape) * 2).astype(
            np.float32
        ),
        discount=discount,
        observation=tree.map_structure(draw, spec.observations),
        previous_action=tree.map_structure(draw, spec.actions),
        environment_id=np.zeros((batch, length), np.int32),
        evaluate=np.zeros((batch, length), np.bool_),
    )


def _make_batch(
    agent: agent_lib.Agent, spec: specs.EnvironmentSpec, seed: int = 0
) -> agent_lib.Batch:
    rng = np.random.default_rng(seed + 1)
    batch, length = agent.batch_size, agent.unroll.window
    params = agent.policy_params(jax.eval_shape(agent.init, jax.random.PRNGKey(0)))
    inputs = _make_inputs(spec, batch, length, seed)
    state = agent.policy.initial_state(batch)
    extras = jax.eval_shape(
        agent.policy.step,
        params,
        np.zeros((batch, 2), np.uint32),
        jax.tree.map(lambda x: x[:, 0], inputs),
        state,
    ).extras
    return agent_lib.Batch(
        unrolls=types.Unroll(
            inputs=inputs,
            action=tree.map_structure(
                lambda leaf: _random_leaf(rng, leaf, (batch, length)), spec.actions
            ),
            extras=jax.tree.map(
                lambda x: rng.normal(size=(batch, length, *x.shape[1:])).astype(x.dtype), extras
            ),
            initial_state=jax.tree.map(
                lambda x: rng.normal(size=x.shape).astype(x.dtype) * 0.5, state
            ),
            info=(),
        ),
        weight=np.ones(batch, np.float32),
    )


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., specs.EnvironmentSpec]:
    """`make_spec(observations, actions) -> EnvironmentSpec`."""
    return _make_spec


@pytest.fixture(scope="session")
def vector_spec() -> specs.EnvironmentSpec:
    """Five floats in, one of three actions out."""
    return _make_spec(dm_specs.Array((5,), np.float32), dm_specs.DiscreteArray(3, np.int32))


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., types.PolicyInput]:
    """`make_inputs(spec, batch, length, seed) -> PolicyInput`, leaves `[batch, length, ...]`."""
    return _make_inputs


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., agent_lib.Batch]:
    """`make_batch(agent, spec, seed) -> Batch` of several episodes per unroll, off-policy."""
    return _make_batch


@pytest.fixture(scope="session")
def make_episodes() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`make_episodes(rng, length) -> (step types, discounts)`, `[length]` each."""
    return _episodes
