"""A tiny agent, lawful unrolls and sources of batches, for the tests of what trains."""

import logging
import threading
from typing import Any, NamedTuple

import acme.specs
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs as dm_specs

from seedlib import specs, types
from seedlib.agents import agent as agent_lib
from seedlib.components import devices, tables

PATIENCE = 60.0
"""Seconds after which a wait counts as a hang."""

FIRST, MID, LAST = 0, 1, 2
SIZE = 3
STEP_SIZE = np.float32(0.125)

SPEC = acme.specs.EnvironmentSpec(
    observations=dm_specs.Array((SIZE,), np.float32),
    actions=dm_specs.DiscreteArray(3, np.int32),
    rewards=dm_specs.Array((), np.float32),
    discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
)

ONE_DEVICE = devices.split_devices(devices=jax.local_devices()[:1])


class TinyState(NamedTuple):
    """Weights of a linear fit of the reward, a target copy that follows slowly, and a count."""

    params: Any
    target: Any
    updates: Any


def tiny_agent(batch_size=4, length=2, init=None, update=None, noise=0.0) -> agent_lib.Agent:
    """An agent that fits `reward = observation @ w` by gradient descent.

    At the start target and parameters are the very same arrays. Its policy acts 0, and its extras
    are the weights, so that a test sees which version acted.

    Args:
      batch_size: unrolls in a batch.
      length: transitions of an unroll.
      init: in place of its own.
      update: in place of its own.
      noise: the size of random numbers that an update adds to the bias.
    """

    def make(key):
        params = {"w": jax.random.normal(key, (SIZE,)), "b": jnp.zeros(())}
        return TinyState(params, params, jnp.zeros((), jnp.int32))

    def loss(params, unrolls):
        observation, reward = unrolls.inputs.observation, unrolls.inputs.reward
        return jnp.mean((observation @ params["w"] + params["b"] - reward) ** 2)

    def learn(state, batch, key):
        value, gradient = jax.value_and_grad(loss)(state.params, batch.unrolls)
        params = jax.tree.map(lambda w, g: w - STEP_SIZE * g, state.params, gradient)
        params["b"] += noise * jax.random.normal(key)
        target = jax.tree.map(lambda t, w: 0.75 * t + 0.25 * w, state.target, params)
        metrics = {"loss": value, "noise": jax.random.uniform(key)}
        return agent_lib.Update(TinyState(params, target, state.updates + 1), metrics, None)

    def act(params, keys, inputs, state):
        batch = inputs.reward.shape[0]
        extras = {"logits": jnp.broadcast_to(params["w"], (batch, SIZE))}
        return types.PolicyOutput(jnp.zeros(batch, jnp.int32), extras, state)

    return agent_lib.Agent(
        policy=agent_lib.Policy(lambda batch: (), act),
        init=init or make,
        update=update or learn,
        policy_params=lambda state: state.params,
        unroll=agent_lib.UnrollShape(length),
        batch_size=batch_size,
    )


def make_unrolls(batch=4, length=2, seed=0, version=0, first_id=0) -> types.Unroll:
    """Unrolls of `SPEC`, leaves `[batch, length + 1, ...]`, of environments `first_id` and on.

    Step types go MID, LAST, FIRST, MID, ... from a start of each row's own; the step indices of row
    i begin at `100 * i`.
    """
    rng = np.random.default_rng(seed)
    window = length + 1
    shape = (batch, window)
    cycle = np.array([MID, LAST, FIRST], np.uint8)
    step_type = cycle[(np.arange(window)[None] + np.arange(batch)[:, None]) % 3]
    return types.Unroll(
        inputs=types.PolicyInput(
            step_type=step_type,
            reward=np.where(step_type == FIRST, 0, rng.normal(size=shape)).astype(np.float32),
            discount=np.where(step_type == LAST, 0, 1).astype(np.float32),
            observation=rng.normal(size=(*shape, SIZE)).astype(np.float32),
            previous_action=rng.integers(0, 3, shape).astype(np.int32),
            environment_id=np.broadcast_to(
                np.arange(first_id, first_id + batch, dtype=np.int32)[:, None], shape
            ).copy(),
            evaluate=np.zeros(shape, np.bool_),
        ),
        action=rng.integers(0, 3, shape).astype(np.int32),
        extras={"logits": rng.normal(size=(*shape, 3)).astype(np.float32)},
        initial_state=(),
        info=types.UnrollInfo(
            policy_version=np.broadcast_to(np.asarray(version, np.int64), shape).copy(),
            step_index=np.arange(batch)[:, None] * 100 + np.arange(window)[None],
            incarnation=np.zeros(shape, np.int64),
        ),
    )


def unroll_spec(length=2) -> types.Unroll:
    """The specs of one such unroll."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), make_unrolls(1, length)
    )


def make_samples(count, batch=4, length=2, seed=0, version=0) -> list[tables.Sample]:
    """`count` different batches."""
    return [
        tables.Sample(make_unrolls(batch, length, seed=1000 * seed + i, version=version))
        for i in range(count)
    ]


class Source:
    """An `UnrollSource` that gives the samples it was given, and after them waits or ends.

    Args:
      samples: an iterable; what it raises is raised by `__next__`.
      ends: whether the end of the samples closes it; else a reader waits until `close`.
    """

    def __init__(self, samples=(), ends=False):
        self._samples = iter(samples)
        self._ends = ends
        self.closed = threading.Event()
        self.waiting = threading.Event()
        self.priorities = []

    def __iter__(self):
        return self

    def __next__(self):
        if self.closed.is_set():
            raise StopIteration
        for sample in self._samples:
            return sample
        if not self._ends:
            self.waiting.set()
            assert self.closed.wait(PATIENCE), "nobody closed the source"
        raise StopIteration

    def update_priorities(self, keys, priorities):
        self.priorities.append((keys, priorities))

    def close(self):
        self.closed.set()


class Published:
    """A publisher that keeps every version: number, arrays, and a copy of them made at once."""

    def __init__(self):
        self.versions = []

    def publish(self, version, params):
        self.versions.append((version, params, jax.tree.map(np.array, params)))


class Log(logging.Handler):
    """Keeps what is logged, from warnings on; `wait` waits for a first message."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []
        self._any = threading.Event()

    def emit(self, record):
        self.messages.append(record.getMessage())
        self._any.set()

    def wait(self):
        assert self._any.wait(PATIENCE), "nothing was logged"

    def __enter__(self):
        logging.getLogger("absl").addHandler(self)
        return self

    def __exit__(self, *exc_info):
        logging.getLogger("absl").removeHandler(self)


class Call:
    """A call in a thread of its own, which must end."""

    def __init__(self, function, *args, **kwargs):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs))
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome = (function(*args, **kwargs), None)
        except BaseException as error:
            self._outcome = (None, error)

    @property
    def running(self):
        return self._thread.is_alive()

    def result(self, timeout=PATIENCE):
        """Returns or raises what the call did; fails where it takes longer than `timeout`."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the call did not end within {timeout} s"
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def zeros(batch=1) -> types.PolicyInput:
    """A policy's input of zeros."""
    return specs.zeros(specs.policy_input_spec(SPEC), (batch,))
