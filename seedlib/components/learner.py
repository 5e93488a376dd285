"""The learner: batches of unrolls in, versions of policy parameters out.

The batch is split over a mesh of training devices; since an agent's loss is a mean over the whole
batch, the update is the same for any number of them. A thread moves batches to the devices ahead of
their use. An update that would make the training state non-finite is skipped on all devices alike.
"""

import collections
import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tree
from absl import logging
from acme import core

from seedlib import types
from seedlib.agents.agent import Agent, Batch
from seedlib.components import configs, tables, threads
from seedlib.components import devices as devices_lib


class LearnerError(Exception):
    """Training cannot go on."""


class Publisher(Protocol):
    """Who takes new parameters."""

    def publish(self, version: int, params: Any) -> None:
        """Takes a whole version; see `ParameterStore.publish`."""
        ...


@dataclasses.dataclass
class LearnerStatistics:
    """What a learner did since its start; 64 bit and more.

    Attributes:
      updates: finished updates, skipped ones included; goes on over a restore.
      skipped_updates: those that would have made the state non-finite.
      transitions: transitions in their batches.
      lag_sum: sum over steps of their policy lag (updates between acting and learning).
      lag_count: steps in that sum.
      lag_max: the largest.
      lag_last: mean lag of the last batch.
      wait_seconds: waiting for a batch.
      update_seconds: from giving an update to the devices to its end.
      publish_seconds: handing over parameters.
    """

    updates: int = 0
    skipped_updates: int = 0
    transitions: int = 0
    lag_sum: int = 0
    lag_count: int = 0
    lag_max: int = 0
    lag_last: float = 0.0
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
    publish_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class LearnerState:
    """What `Learner.save` returns: enough to go on exactly.

    Attributes:
      state: the agent's training state, on the host.
      updates: finished updates, which the random numbers of an update depend on.
      skipped_updates: see `LearnerStatistics`.
    """

    state: Any
    updates: int
    skipped_updates: int = 0


class Learner(core.Learner):
    """Updates an agent's training state. `step` and `run` belong to one thread."""

    def __init__(
        self,
        agent: Agent,
        source: tables.UnrollSource,
        split: devices_lib.DeviceSplit,
        publisher: Publisher | None = None,
        config: configs.LearnerConfig | None = None,
    ) -> None:
        """Makes the first training state and publishes it as version 0.

        Args:
          agent: the algorithm.
          source: where batches come from; the learner closes it.
          split: which devices train.
          publisher: who takes new parameters.
          config: how it works.

        Raises:
          ValueError: the training devices cannot share a batch evenly.
        """
        config = config or configs.LearnerConfig()
        split.check_batch_size(agent.batch_size)
        self._agent = agent
        self._source = source
        self._publisher = publisher
        self._config = config
        mesh = split.mesh()
        self._replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._sharded = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(devices_lib.BATCH_AXIS)
        )
        # Such a device reads the batch where it is; moving it costs more than a small update.
        self._reads_host_memory = [device.platform for device in split.training] == ["cpu"]
        self._key = jax.device_put(jax.random.PRNGKey(config.seed), self._replicated)
        initial_key, self._update_key = jax.random.split(self._key)
        self._state = jax.jit(_make_init(agent), out_shardings=self._replicated)(initial_key)
        # JAX's checker of NaN computes an update again to find where it came from, and needs the
        # state that was for that.
        checked = jax.debug_nans.value or jax.debug_infs.value
        self._update = jax.jit(
            _make_update(agent),
            donate_argnums=() if checked else (0,),
            out_shardings=self._replicated,
        )
        self._policy_params = jax.jit(
            lambda state: jax.tree_util.tree_map(jnp.copy, agent.policy_params(state))
        )
        self._params = self._policy_params(self._state)
        self._in_flight: collections.deque[tuple[Any, ...]] = collections.deque()
        self._skipped_in_a_row = 0
        self._last_metrics: dict[str, jax.Array] = {}
        self.statistics = LearnerStatistics()
        self._dispatched = 0
        self._batches: queue.Queue[Any] = queue.Queue(config.prefetch)
        self._stopping = threading.Event()
        self._threads = threads.ThreadGroup("learner")
        self._started = False
        self._publish(0)

    def _publish(self, version: int) -> None:
        started = time.monotonic()
        if self._publisher is not None:
            self._publisher.publish(version, self._params)
        self.statistics.publish_seconds += time.monotonic() - started

    def _prefetch(self) -> None:
        """Moves batches to the devices, ahead of their use."""
        for sample in self._source:
            batch = self._load(sample)
            while not self._stopping.is_set():
                try:
                    self._batches.put((sample, batch), timeout=0.5)
                    break
                except queue.Full:
                    continue
            if self._stopping.is_set():
                return
        self._threads.finish()

    def _load(self, sample: tables.Sample) -> Batch:
        """Moves a batch to the devices."""
        weight = sample.weight
        if weight is None:
            weight = np.ones(self._agent.batch_size, np.float32)
        batch = Batch(sample.unrolls._replace(info=()), weight)
        if self._reads_host_memory:
            return batch
        return jax.device_put(batch, self._sharded)

    def step(self, timeout: float | None = None) -> bool:
        """Performs one update.

        Args:
          timeout: seconds to wait for a batch; None waits until there is one.

        Returns:
          Whether there was a batch in time. False too where the source is closed.

        Raises:
          LearnerError: several updates in a row had to be skipped.
        """
        if not self._started and self._config.prefetch:
            self._started = True
            self._threads.start(self._prefetch, "prefetch")
        started = time.monotonic()
        item = self._next_batch(timeout)
        taken = time.monotonic()
        self.statistics.wait_seconds += taken - started
        if item is None:
            return False
        sample, batch = item
        self._observe_lag(sample.unrolls)
        # 32 unsigned bits: a Python integer beyond 2^31 does not fit the type that JAX gives it.
        count = np.uint32(self._dispatched % 2**32)
        self._state, self._params, metrics, priorities, finite = self._update(
            self._state, batch, self._update_key, count
        )
        self._dispatched += 1
        self._in_flight.append((sample, self._params, metrics, priorities, finite, taken))
        while len(self._in_flight) >= self._config.updates_in_flight:
            self._finish_update()
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the source or the learner is closed and no batch is left.

        Raises:
          BaseException: what the source raised.
        """
        ended = self._threads.wait(0) or self._stopping.is_set()
        return ended and self._batches.empty()

    def _next_batch(self, timeout: float | None) -> Any:
        if not self._config.prefetch:
            for sample in self._source:
                return sample, self._load(sample)
            self._threads.finish()
            return None
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            # Asked before the queue is: a thread that has ended puts nothing more into it.
            ended = self._threads.wait(0) or self._stopping.is_set()
            left = 0.0 if ended else deadline - time.monotonic()
            try:
                # Short waits, since a failed prefetch thread cannot wake this one.
                return self._batches.get(timeout=max(0.0, min(left, 0.1)))
            except queue.Empty:
                if ended or left <= 0.0:
                    return None

    def _observe_lag(self, unrolls: types.Unroll) -> None:
        lag = self._dispatched - unrolls.info.policy_version
        statistics = self.statistics
        statistics.lag_sum += int(lag.sum())
        statistics.lag_count += lag.size
        statistics.lag_max = max(statistics.lag_max, int(lag.max()))
        statistics.lag_last = float(lag.mean())
        statistics.transitions += int(np.count_nonzero(unrolls.inputs.step_type[:, 1:]))

    def _finish_update(self) -> None:
        """Waits for the oldest update in flight, checks and publishes it."""
        sample, params, metrics, priorities, finite, dispatched = self._in_flight.popleft()
        finite = bool(finite)
        statistics = self.statistics
        statistics.update_seconds += time.monotonic() - dispatched
        statistics.updates += 1
        if not finite:
            statistics.skipped_updates += 1
            self._skipped_in_a_row += 1
            reason = _find_non_finite(sample.unrolls)
            logging.error("update %d was skipped: %s", statistics.updates, reason)
            if self._skipped_in_a_row >= self._config.max_skipped_updates:
                raise LearnerError(f"{self._skipped_in_a_row} updates in a row skipped: {reason}")
            return
        self._skipped_in_a_row = 0
        self._last_metrics = metrics
        started = time.monotonic()
        if self._publisher is not None:
            self._publisher.publish(statistics.updates, params)
        if sample.keys is not None and priorities is not None:
            self._source.update_priorities(sample.keys, np.asarray(priorities))
        statistics.publish_seconds += time.monotonic() - started

    def run(self, num_steps: int | None = None, stop: Callable[[], bool] | None = None) -> None:
        """Performs updates until told to stop.

        Args:
          num_steps: at most so many; None for no limit.
          stop: asked before each update, and at least each second while no batch comes.
        """
        done = itertools.count() if num_steps is None else range(num_steps)
        for _ in done:
            while True:
                if self._stopping.is_set() or (stop is not None and stop()):
                    self.flush()
                    return
                if self.step(timeout=1.0):
                    break
                if self.exhausted:
                    self.flush()
                    return
        self.flush()

    def flush(self) -> None:
        """Waits for every update in flight."""
        while self._in_flight:
            self._finish_update()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last update that was not skipped; empty before the first."""
        return {name: float(value) for name, value in self._last_metrics.items()}

    def get_variables(self, names: Sequence[str]) -> list[types.Nested]:
        """Returns the policy's parameters as NumPy arrays, once for each name ("policy").

        Raises:
          KeyError: a name is not "policy".
        """
        for name in names:
            if name != "policy":
                raise KeyError(f"unknown variables {name!r}; there are only 'policy'")
        return [jax.device_get(self._params) for _ in names]

    def save(self) -> LearnerState:
        """Returns all that is needed to go on; waits for the updates in flight."""
        self.flush()
        return LearnerState(
            jax.device_get(self._state), self.statistics.updates, self.statistics.skipped_updates
        )

    def restore(self, state: LearnerState) -> None:
        """Goes on from a saved state, and publishes its parameters under its version."""
        self.flush()
        self._state = jax.device_put(state.state, self._replicated)
        # A restored array may be used by its giver too, and updates donate theirs.
        self._state = jax.tree_util.tree_map(jnp.copy, self._state)
        self._params = self._policy_params(self._state)
        self._dispatched = state.updates
        self.statistics.updates = state.updates
        self.statistics.skipped_updates = state.skipped_updates
        self._publish(state.updates)

    def close(self) -> None:
        """Ends the source and the prefetch thread. May be called twice.

        Raises:
          TimeoutError: the thread did not end.
        """
        self._stopping.set()
        self._source.close()
        self._threads.join(timeout=10.0)


def _make_init(agent: Agent) -> Callable[[jax.Array], Any]:
    """Returns `init(key) -> state` whose leaves have the types that they have ever after.

    A leaf made of a Python number is "weakly typed", which a restored one is not, and the update
    would be compiled anew for it.
    """

    def init(key: jax.Array) -> Any:
        return jax.tree_util.tree_map(
            lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), agent.init(key)
        )

    return init


def _make_update(agent: Agent) -> Callable[..., Any]:
    """Returns the function that the training devices compute.

    `(state, batch, key, count) -> (state, policy params, metrics, priorities, finite)`; where the
    new state is not finite the old one is returned instead.
    """

    def update(state: Any, batch: Batch, key: jax.Array, count: jax.Array) -> Any:
        result = agent.update(state, batch, jax.random.fold_in(key, count))
        floats = [
            leaf
            for leaf in jax.tree_util.tree_leaves((result.state, result.priorities))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        finite = jnp.all(jnp.stack([True, *(jnp.all(jnp.isfinite(leaf)) for leaf in floats)]))
        state = jax.tree_util.tree_map(
            lambda new, old: jnp.where(finite, new, old), result.state, state
        )
        # Returned apart from the state, so that donating the state leaves readers their copy.
        params = agent.policy_params(state)
        return state, params, result.metrics, result.priorities, finite

    return update


def _find_non_finite(unrolls: types.Unroll) -> str:
    """Says which environment brought the first non-finite number, and at which of its steps."""
    for path, leaf in tree.flatten_with_path(unrolls._replace(info=())):
        if np.asarray(leaf).dtype.kind == "f" and not np.isfinite(leaf).all():
            where = np.argwhere(~np.isfinite(leaf))[0]
            row = int(where[0])
            step = int(where[1]) if path[0] != "initial_state" else 0
            return (
                f"{'/'.join(map(str, path))} of environment "
                f"{int(unrolls.inputs.environment_id[row, step])} is not finite at its step "
                f"{int(unrolls.info.step_index[row, step])}"
            )
    return "the batch is finite; the update itself was not (is the learning rate too high?)"
