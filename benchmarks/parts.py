"""The three things that any implementation must compute, each measured alone, and example unrolls.

Environment, policy and update as plain calls in a loop, without the library's machinery: the sum of
their CPU time per agent step is the *floor* of a program that acts and learns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import dm_env
import jax
import numpy as np
import tree

from benchmarks import harness, null_policy
from seedlib import environments, specs, types
from seedlib.agents import vtrace
from seedlib.agents.agent import Agent, Batch
from seedlib.agents.vtrace import config as config_lib
from seedlib.components import devices, inference, parameters, tables

# As in the programs.
devices.compute_in_calling_threads()

NETS = {"mlp": "16 B", "shallow": "84x84x4", "deep": "84x84x4"}
"""The observation that each torso is measured with, as `null_policy.OBSERVATIONS` names it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An agent with an environment's spec.

    Attributes:
      agent: the algorithm.
      spec: of the environment.
    """

    agent: Agent
    spec: specs.EnvironmentSpec

    @functools.cached_property
    def unroll_specs(self) -> types.Unroll:
        """Specs of one unroll."""
        return inference.unroll_specs(self.agent, self.spec)


def make_case(torso: str, batch_size: int = 32, lstm: bool = False) -> Case:
    """Returns a V-trace agent with a net, for the observation that suits it."""
    spec = null_policy.environment_spec(null_policy.OBSERVATIONS[NETS[torso]])
    config = config_lib.Config(torso=torso, batch_size=batch_size, lstm_size=256 if lstm else None)
    return Case(vtrace.make_agent(spec, config), spec)


def make_unrolls(case: Case, count: int) -> types.Unroll:
    """Returns unrolls, leaves `[count, L, ...]`, of one endless episode with random pixels."""
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> np.ndarray:
        shape = (count, *leaf.shape)
        if leaf.dtype == np.uint8:
            return random.integers(0, 256, shape, np.uint8)
        if leaf.dtype == np.float32:
            return random.normal(size=shape).astype(np.float32) * 0.1
        return np.zeros(shape, leaf.dtype)

    unrolls = tree.map_structure(fill, case.unroll_specs)
    middle = np.full_like(unrolls.inputs.step_type, int(dm_env.StepType.MID))
    return unrolls._replace(
        inputs=unrolls.inputs._replace(
            step_type=middle, discount=np.ones_like(unrolls.inputs.discount)
        )
    )


class SameBatch:
    """An `UnrollSource` that gives the same batch for ever."""

    def __init__(self, unrolls: types.Unroll) -> None:
        self._sample = tables.Sample(unrolls)
        self._closed = False

    def __iter__(self) -> Iterator[tables.Sample]:
        """Returns itself."""
        return self

    def __next__(self) -> tables.Sample:
        """Returns the batch."""
        if self._closed:
            raise StopIteration
        return self._sample

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Nobody keeps priorities."""

    def close(self) -> None:
        """Ends it."""
        self._closed = True


class NullSink:
    """An `UnrollSink` that keeps nothing."""

    def insert(self, unrolls: types.Unroll) -> None:
        """Drops them."""

    def close(self) -> None:
        """Does nothing."""


def parameter_store(case: Case) -> parameters.ParameterStore:
    """Returns a store that holds a first version."""
    store = parameters.ParameterStore(jax.local_devices()[:1])
    store.publish(0, case.agent.policy_params(case.agent.init(jax.random.PRNGKey(0))))
    return store


def bare_update(case: Case, unrolls: types.Unroll) -> Callable[[], None]:
    """Returns the agent's jitted update as a call, on a batch that lies on the device."""
    agent = case.agent
    batch = jax.device_put(Batch(unrolls._replace(info=()), np.ones(agent.batch_size, np.float32)))
    key = jax.random.PRNGKey(0)
    update = jax.jit(agent.update, donate_argnums=(0,))
    state = [jax.jit(agent.init)(key)]

    def work() -> None:
        result = update(state[0], batch, key)
        state[0] = result.state
        jax.block_until_ready(result.metrics)

    work()  # Compiles.
    work()
    return work


def bare_policy(case: Case, rows: int) -> Callable[[], None]:
    """Returns the agent's jitted policy as a call, from host rows to host actions."""
    policy = case.agent.policy
    step = jax.jit(policy.step)
    params = jax.jit(lambda key: case.agent.policy_params(case.agent.init(key)))(
        jax.random.PRNGKey(0)
    )
    inputs = specs.zeros(specs.policy_input_spec(case.spec), (rows,))
    keys = np.zeros((rows, 2), np.uint32)
    state = [policy.initial_state(rows)]

    def work() -> None:
        output = step(params, keys, inputs, state[0])
        state[0] = output.state
        jax.tree_util.tree_map(np.asarray, output.action)

    work()  # Compiles.
    work()
    return work


def environment_alone(name: str, seconds: float, runs: int) -> list[tuple[int, harness.Cost]]:
    """Measures one environment with random actions.

    Returns:
      Agent steps (resets are none, but their time counts) and their cost, of each run.
    """
    environment = environments.load(name)(seed=0)
    action_spec = specs.make_environment_spec(environment).actions
    random = np.random.default_rng(0)
    actions = random.integers(0, action_spec.num_values, 256).astype(action_spec.dtype)
    steps = [0]

    def work() -> None:
        for action in actions:
            steps[0] += not environment.step(action).first()

    work()
    measured = []
    for _ in range(runs):
        steps[0] = 0
        _, cost = harness.repeat(work, seconds)
        measured.append((steps[0], cost))
    environment.close()
    return measured
