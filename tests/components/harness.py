"""What the tests of components share: a counting agent, an environment, sinks and threads.

The agent is made of pure functions and fulfils the contract of `seedlib.agents.agent`; it learns
nothing, but everything that it answers can be worked out by hand.
"""

import contextlib
import itertools
import threading
import time

import acme.specs
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs as dm_specs

from seedlib import types
from seedlib.agents import agent as agent_lib
from seedlib.components import configs, inference, parameters, tables
from seedlib.components.transport import service

FIRST, MID, LAST = 0, 1, 2
PATIENCE = 60.0
"""Seconds after which a wait counts as a hang."""


def make_spec(observations, actions=None):
    return acme.specs.EnvironmentSpec(
        observations=observations,
        actions=dm_specs.DiscreteArray(5, np.int32) if actions is None else actions,
        rewards=dm_specs.Array((), np.float32),
        discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
    )


def counting_agent(spec, shape, num_values=5, on_step=None):
    """An agent whose recurrent state counts the inputs since FIRST.

    Its action is a draw from the row's own random stream, in the shape of the action spec. Its
    extras are the count before the step, the smallest and the largest leaf of the parameters, and
    logits that are the reward times 0..4. Its parameters all hold the same number.
    """

    def step(params, keys, inputs, state):
        count = jnp.where(inputs.step_type == FIRST, 0, state["count"])

        def draw(leaf):
            one = lambda key: jax.random.randint(key, leaf.shape, 0, num_values)
            return jax.vmap(one)(keys).astype(leaf.dtype)

        leaves = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])
        extras = {
            "count": count,
            "smallest": jnp.broadcast_to(leaves.min(), count.shape),
            "largest": jnp.broadcast_to(leaves.max(), count.shape),
            "logits": inputs.reward[:, None] * jnp.arange(5.0),
        }
        if on_step is not None:
            extras = on_step(inputs, extras)
        return types.PolicyOutput(jax.tree.map(draw, spec.actions), extras, {"count": count + 1})

    def update(state, batch, key):
        raise NotImplementedError("the counting agent does not learn")

    return agent_lib.Agent(
        policy=agent_lib.Policy(
            lambda batch_size: {"count": jnp.zeros((batch_size,), jnp.int32)}, step
        ),
        init=lambda key: version_params(0),
        update=update,
        policy_params=lambda state: state,
        unroll=shape,
        batch_size=1,
    )


def version_params(version):
    """Parameters of which every number is the version."""
    return {
        "a": jnp.full((3,), version, jnp.int32),
        "b": (jnp.full((100, 100), version, jnp.int32), jnp.full((), version, jnp.int32)),
    }


class Recorder:
    """A sink in memory: keeps what it gets. A `tables.UnrollSink`."""

    def __init__(self):
        self.batches = []
        self.closed = False

    def insert(self, unrolls):
        if self.closed:
            raise tables.SinkClosed("closed")
        self.batches.append(unrolls)

    def close(self):
        self.closed = True

    def unrolls(self):
        """Returns every unroll apart, in order; leaves `[L, ...]`."""
        return [
            jax.tree.map(lambda leaf, row=row: leaf[row], batch)
            for batch in self.batches
            for row in range(len(batch.inputs.reward))
        ]

    def of(self, environment_id):
        return [u for u in self.unrolls() if u.inputs.environment_id[0] == environment_id]


class GatedSink(Recorder):
    """A sink without room until `open` is called."""

    def __init__(self):
        super().__init__()
        self.blocked = threading.Event()
        self._gate = threading.Event()

    def insert(self, unrolls):
        self.blocked.set()
        if not self._gate.wait(10 * PATIENCE):  # Others shall hang first.
            raise AssertionError("nobody opened or closed the sink")
        super().insert(unrolls)

    def open(self):
        self._gate.set()

    def close(self):
        super().close()
        self._gate.set()


class Observed:
    """Counts what a server says about steps and episodes. An `inference.StepObserver`."""

    def __init__(self):
        self.agent_steps = 0
        self.episodes = []  # (environment_id, return, length, evaluate)

    def observe(self, agent_steps, episodes):
        self.agent_steps += agent_steps
        if episodes is not None:
            self.episodes += zip(*(field.tolist() for field in episodes), strict=True)


@contextlib.contextmanager
def serving(agent, spec, sink=None, observer=None, params=None, devices=None, **config):
    """Yields a started inference server; `server.store` is where its parameters come from.

    At a good end a `Recorder` gets what was answered: it is closed only after that.
    """
    devices = devices or jax.local_devices()[:1]
    store = parameters.ParameterStore(devices)
    if params is None:
        params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    store.publish(0, params)
    config.setdefault("max_environments", 16)
    config.setdefault("batch_sizes", (8,))  # One, since each is compiled.
    config.setdefault("batch_timeout", 0.002)
    config.setdefault("step_timeout", PATIENCE)
    server = inference.InferenceServer(
        agent, spec, store, sink, configs.InferenceConfig(**config), devices, observer
    )
    server.store = store
    try:
        server.start(PATIENCE)
        yield server
        if type(sink) is Recorder and not sink.closed and server.ready:
            settle(server)
    finally:
        server.stop()


def settle(server):
    """Waits until what was answered is counted and in unrolls; nobody may step meanwhile."""
    for lane in server._lanes:
        batcher = lane.batcher
        # In the order of a batch's life, so that none slips through between two looks.
        wait_until(
            lambda batcher=batcher: not (batcher._filling or batcher._full or batcher._taken)
        )


_INCARNATIONS = itertools.count()


def hello(spec, ids, evaluate=False, actor_id="actor", token=""):
    return service.Hello(
        actor_id=actor_id,
        environment_ids=tuple(ids),
        incarnation=str(next(_INCARNATIONS)),
        evaluate=evaluate,
        observation_spec=spec.observations,
        action_spec=spec.actions,
        run_token=token,
    )


def time_steps(step_type, observation, reward=None, discount=None):
    """Time steps of E rows; a reward of 0 and a discount of 1 where none is given."""
    step_type = np.asarray(step_type, np.uint8)
    rows = step_type.shape
    return dm_env.TimeStep(
        step_type,
        np.zeros(rows, np.float32) if reward is None else np.asarray(reward, np.float32),
        np.ones(rows, np.float32) if discount is None else np.asarray(discount, np.float32),
        observation,
    )


class Numbered(dm_env.Environment):
    """Observations say where they come from: int32 `[mark, episode, step of the episode]`.

    Every reward is 1. Episodes have `length` transitions, and end by truncation and termination in
    turn. The observation is one array, written anew at each step, as in shared memory.
    """

    def __init__(self, length=3, mark=0):
        self._length = length
        self._state = np.array([mark, -1, 0], np.int32)
        self._over = True
        self.actions = []
        self.closed = 0

    def reset(self):
        self._over = False
        self._state[1:] = self._state[1] + 1, 0
        return dm_env.restart(self._state)

    def step(self, action):
        if self._over:
            return self.reset()
        self.actions.append(action)
        self._state[2] += 1
        if self._state[2] < self._length:
            return dm_env.transition(1.0, self._state)
        self._over = True
        if self._state[1] % 2:
            return dm_env.termination(1.0, self._state)
        return dm_env.truncation(1.0, self._state)

    def observation_spec(self):
        return dm_specs.Array((3,), np.int32)

    def action_spec(self):
        return dm_specs.DiscreteArray(5, np.int32)

    def close(self):
        self.closed += 1


NUMBERED_SPEC = make_spec(dm_specs.Array((3,), np.int32))


class Call:
    """A call in a thread of its own, which must end."""

    def __init__(self, function, *args, **kwargs):
        self._thread = threading.Thread(
            target=self._run, args=(function, args, kwargs), daemon=True
        )
        self._outcome = None
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome = (function(*args, **kwargs), None)
        except BaseException as error:
            self._outcome = (None, error)

    def result(self):
        """Waits for the end; returns or raises what the function did."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call hangs"
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def together(functions):
    """Calls functions in threads of their own; returns their results in order."""
    calls = [Call(function) for function in functions]
    return [call.result() for call in calls]


def wait_until(predicate):
    """Waits for a state that another thread brings about and has no event for."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not predicate():
        assert time.monotonic() < deadline, "the state never came"
        pause.wait(0.002)
