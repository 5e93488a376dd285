"""Agents as a user may bring them, that go wrong when a program is under way."""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import numpy as np
import tree
from jax.experimental import io_callback

from seedlib import specs
from seedlib.agents.agent import Agent, Update
from seedlib.agents.vtrace import agent as vtrace_agent
from seedlib.agents.vtrace import config as vtrace_config


def _sound(environment_spec: specs.EnvironmentSpec, batch_size: int) -> Agent:
    config = vtrace_config.Config(batch_size=batch_size, hidden_sizes=(16,))
    return vtrace_agent.make_agent(environment_spec, config)


def failing_loss(environment_spec: specs.EnvironmentSpec, batch_size: int) -> Agent:
    """Raises in the learner, when the first update is traced."""

    def update(state: Any, batch: Any, key: Any) -> Any:
        raise RuntimeError("the loss is at a loss")

    return dataclasses.replace(_sound(environment_spec, batch_size), update=update)


def failing_policy(environment_spec: specs.EnvironmentSpec, batch_size: int) -> Agent:
    """Raises in a device call of inference, after some that went well."""
    sound = _sound(environment_spec, batch_size)
    calls = 0

    def count(action: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 100:
            raise RuntimeError("the policy is out of ideas")
        return action

    def step(params: Any, keys: Any, inputs: Any, state: Any) -> Any:
        output = sound.policy.step(params, keys, inputs, state)
        like = jax.ShapeDtypeStruct(output.action.shape, output.action.dtype)
        return output._replace(action=jax.pure_callback(count, like, output.action))

    return dataclasses.replace(sound, policy=sound.policy._replace(step=step))


def recording(environment_spec: specs.EnvironmentSpec, batch_size: int, folder: str) -> Agent:
    """Learns nothing, and writes every batch that it gets to `folder`, numbered from 0."""
    sound = vtrace_agent.make_agent(
        environment_spec,
        vtrace_config.Config(
            batch_size=batch_size, hidden_sizes=(16,), lstm_size=8, unroll_length=10
        ),
    )
    written = itertools.count()

    def write(unrolls: Any) -> None:
        leaves = {
            "/".join(map(str, path)): np.asarray(leaf)
            for path, leaf in tree.flatten_with_path(unrolls)
        }
        np.savez(pathlib.Path(folder) / f"{next(written):06d}.npz", **leaves)

    def update(state: Any, batch: Any, key: Any) -> Update:
        del key
        io_callback(write, None, batch.unrolls, ordered=True)
        return Update(state, {"reward": batch.unrolls.inputs.reward.mean()}, None)

    return dataclasses.replace(sound, update=update)
