"""Central inference: the policy, its parameters and every environment's state on one accelerator.

An `InferenceServer` is a `PolicyService`. Time steps of many actors are batched; one jitted call
per batch gathers each row's recurrent state by slot, resets it where an episode begins, applies the
policy, samples with the row's own random stream and scatters the state back (donated). Rows and
answers then go to the unroll assembler, and whole unrolls to a sink. Recurrent state never leaves
the device but for the first step of an unroll.

Each inference device is a lane of its own: a batcher, the state of its environments, one thread
that dispatches batches and one that collects results, so that a batch runs while the next fills.
"""

import contextlib
import dataclasses
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import tree
from absl import logging

from seedlib import specs, types
from seedlib.agents.agent import Agent
from seedlib.components import batcher as batcher_lib
from seedlib.components import configs, records, tables, threads, unrolls
from seedlib.components import episodes as episodes_lib
from seedlib.components import parameters as parameters_lib
from seedlib.components.transport import service, wire

# Columns of a row's header, int32. Step, version and key have two each: 64-bit numbers, the lower
# half first.
_SLOT, _ENVIRONMENT, _INCARNATION, _FLAGS, _STEP, _VERSION, _KEY, _COLUMNS = 0, 1, 2, 3, 4, 6, 8, 10
_FRESH, _EVALUATE = 1, 2
_STEP_MASK = 0x7FFFFFFF


def _halves(number: int) -> np.ndarray:
    """Returns a number of 64 bits as two of 32, the lower one first."""
    return np.array([number], "<i8").view("<i4")


class StepObserver(Protocol):
    """Who counts what the environments did."""

    def observe(self, agent_steps: int, episodes: episodes_lib.Episodes | None) -> None:
        """Counts one batch.

        Args:
          agent_steps: transitions of training environments in it.
          episodes: the episodes that ended, of training and of evaluation, or None.
        """
        ...


@dataclasses.dataclass
class InferenceStatistics:
    """What a server did since its start; sums over its devices, 64 bit and more.

    Attributes:
      batches: device calls.
      rows: rows answered.
      padded_rows: rows computed, padding included.
      agent_steps: transitions of training environments.
      unrolls: unrolls given to the sink.
      dropped_steps: steps in partial unrolls of environments that came anew.
      fenced_sessions: sessions that a newer incarnation replaced.
      sessions: sessions that are open now.
      compilations: compiled programs; flat once the server is ready.
      wait_seconds: dispatcher waiting for rows.
      dispatch_seconds: handing batches to the device.
      device_seconds: collector waiting for the device.
      assemble_seconds: assembling unrolls, counting episodes.
      insert_seconds: giving unrolls to the sink, waiting for room included.
      network_bytes_observations: time steps from other processes, and the actions sent back.
      network_bytes_parameters: parameters from a learner in another process.
      network_bytes_unrolls: unrolls given to a table in another process, before its compression.
    """

    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    agent_steps: int = 0
    unrolls: int = 0
    dropped_steps: int = 0
    fenced_sessions: int = 0
    sessions: int = 0
    compilations: int = 0
    wait_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    device_seconds: float = 0.0
    assemble_seconds: float = 0.0
    insert_seconds: float = 0.0
    network_bytes_observations: int = 0
    network_bytes_parameters: int = 0
    network_bytes_unrolls: int = 0


def policy_step_specs(
    agent: Agent, environment_spec: specs.EnvironmentSpec
) -> tuple[types.Unroll, types.Nested]:
    """Returns what one step of an unroll and one recurrent state look like.

    Args:
      agent: the algorithm.
      environment_spec: canonical.

    Returns:
      An `Unroll` of one step's leaves without leading dimension (`initial_state` is `()`), and the
      state's leaves, each with `shape` and `dtype`.
    """
    inputs = specs.policy_input_spec(environment_spec)
    batched = tree.map_structure(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), inputs
    )

    def act(key: jax.Array, inputs: types.PolicyInput) -> types.PolicyOutput:
        params = agent.policy_params(agent.init(key))
        return agent.policy.step(params, key[None], inputs, agent.policy.initial_state(1))

    output = jax.eval_shape(act, jax.random.PRNGKey(0), batched)
    row: Callable[[Any], jax.ShapeDtypeStruct] = lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape[1:], leaf.dtype
    )
    scalar: Any = jax.ShapeDtypeStruct((), np.dtype(np.int64))
    step = types.Unroll(
        inputs=inputs,
        action=environment_spec.actions,
        extras=jax.tree_util.tree_map(row, output.extras),
        initial_state=(),
        info=types.UnrollInfo(scalar, scalar, scalar),
    )
    return step, jax.tree_util.tree_map(row, output.state)


def unroll_specs(agent: Agent, environment_spec: specs.EnvironmentSpec) -> types.Unroll:
    """Returns the specs of one whole unroll: leaves `[L, ...]`, `initial_state` `[...]`."""
    step, state = policy_step_specs(agent, environment_spec)
    window = agent.unroll.window
    unroll = tree.map_structure(
        lambda leaf: jax.ShapeDtypeStruct((window, *leaf.shape), leaf.dtype), step
    )
    return unroll._replace(initial_state=state)


class InferenceServer:
    """Answers time steps with actions, and turns them into unrolls. A `PolicyService`."""

    def __init__(
        self,
        agent: Agent,
        environment_spec: specs.EnvironmentSpec,
        parameters: parameters_lib.ParameterSource,
        sink: tables.UnrollSink | None,
        config: configs.InferenceConfig,
        devices: Sequence[jax.Device] | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        """Makes a server; `start` makes it answer.

        Args:
          agent: the algorithm.
          environment_spec: canonical; what every session must have.
          parameters: where versions come from.
          sink: where unrolls go; None keeps none.
          config: how it works.
          devices: on which devices; None takes the first local one.
          observer: who counts steps and episodes.
        """
        devices = tuple(devices) if devices is not None else (jax.local_devices()[0],)
        self._spec = environment_spec
        self._config = config
        self._sink = sink
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._incarnations: dict[int, int] = {}
        self._fenced = 0
        self._network: list[Callable[[], int]] = []
        self._stopped = False
        self._ready = threading.Event()
        self._threads = threads.ThreadGroup("inference")
        self._threads.on_error(self._abandon)
        self._lanes = [
            _Lane(agent, environment_spec, parameters, sink, config, device, observer)
            for device in devices
        ]

    def start(self, timeout: float = 600.0) -> None:
        """Compiles every batch size and starts to answer.

        Args:
          timeout: seconds to wait for the first parameters.

        Raises:
          TimeoutError: no parameters came.
        """
        for number, lane in enumerate(self._lanes):
            lane.warm_up(timeout)
            if self._config.inline:
                continue
            if lane.in_flight == 1:
                self._threads.start(lane.serve, f"serve-{number}")
                continue
            self._threads.start(lane.dispatch, f"dispatch-{number}")
            self._threads.start(lane.collect, f"collect-{number}")
        self._ready.set()

    @property
    def ready(self) -> bool:
        """Whether every batch size is compiled and sessions are answered."""
        return self._ready.is_set() and not self._stopped

    def open(self, hello: service.Hello, timeout: float | None = None) -> "_Session":
        """See `PolicyService.open`. Environments that come again are fenced off from before.

        Raises:
          service.Refused: token, specs, ids or the number of environments do not fit.
          service.Unavailable: not ready within `timeout`, or stopped.
        """
        if not secrets.compare_digest(
            hello.run_token.encode("utf-8"), self._config.run_token.encode("utf-8")
        ):
            raise service.Refused("run token: missing, or of another run")
        self._check_hello(hello)
        if not self._ready.wait(timeout) or self._stopped:
            raise service.Unavailable("the inference server is not ready, or stopped")
        with self._lock:
            if self._stopped:
                raise service.Unavailable("the inference server is stopped")
            replaced = {self._sessions[i] for i in hello.environment_ids if i in self._sessions}

            def room(lane: _Lane) -> int:
                freed = sum(len(session.slots) for session in replaced if session.lane is lane)
                return len(lane.free_slots) + freed

            lane = max(self._lanes, key=room)
            count = len(hello.environment_ids)
            if count > room(lane):  # Before anybody is fenced off in vain.
                limit = self._config.max_environments
                raise service.Refused(
                    f"{hello.actor_id} brings {count} environments, but only "
                    f"{room(lane)} of max_environments={limit} are free"
                )
            for session in replaced:
                logging.info("%s: replaced by %s", session.name, hello.actor_id)
                self._fenced += 1
                self._forget(session, service.Fenced(f"replaced by {hello.actor_id}"))
            slots = [lane.free_slots.pop() for _ in range(count)]
            incarnations = [self._incarnations.get(i, 0) for i in hello.environment_ids]
            for i, incarnation in zip(hello.environment_ids, incarnations, strict=True):
                self._incarnations[i] = incarnation + 1
            session = _Session(self, lane, hello, slots, incarnations)
            for i in hello.environment_ids:
                self._sessions[i] = session
        return session

    def _check_hello(self, hello: service.Hello) -> None:
        ids = hello.environment_ids
        if not ids or len(set(ids)) != len(ids):
            raise service.Refused(f"environment ids must be distinct and not empty, got {ids}")
        if min(ids) < 0 or max(ids) > np.iinfo(np.int32).max:
            raise service.Refused(f"environment ids must be in 0..2^31-1, got {ids}")
        largest = self._config.batch_sizes[-1]
        if len(ids) > largest:
            raise service.Refused(
                f"{hello.actor_id} brings {len(ids)} environments; the largest batch size is "
                f"{largest}"
            )
        for name, theirs, ours in (
            ("observation", hello.observation_spec, self._spec.observations),
            ("action", hello.action_spec, self._spec.actions),
        ):
            difference = wire.spec_difference(ours, theirs, name)
            if difference:
                raise service.Refused(difference)

    def _forget(self, session: "_Session", reason: service.PolicyServiceError) -> None:
        """Ends a session; holds the lock."""
        if session.end(reason):
            for i, incarnation in zip(session.environment_ids, session.incarnations, strict=True):
                self._sessions.pop(i, None)
                if not session.started:  # As when nobody waited for the answer to its hello.
                    self._incarnations[i] = incarnation
            session.lane.free_slots.extend(session.slots)

    def close_session(self, session: "_Session") -> None:
        """Frees what a session holds."""
        with self._lock:
            self._forget(session, service.Unavailable("the session is closed"))

    def watch_network(self, network_bytes: Callable[[], int]) -> None:
        """Includes what a server of this service passes over the network. See `NetworkWatcher`."""
        self._network.append(network_bytes)

    def statistics(self) -> InferenceStatistics:
        """Returns a copy of what was counted so far."""
        total = InferenceStatistics(fenced_sessions=self._fenced)
        for lane in self._lanes:
            lane.statistics.compilations = lane.compilations
            for field in dataclasses.fields(total):
                setattr(
                    total,
                    field.name,
                    getattr(total, field.name) + getattr(lane.statistics, field.name),
                )
        total.sessions = len(set(self._sessions.values()))
        total.network_bytes_observations = sum(count() for count in self._network)
        # A sink that never leaves its process does not count.
        total.network_bytes_unrolls = getattr(self._sink, "network_bytes", 0)
        return total

    def _abandon(self) -> None:
        """Lets nobody wait for an answer that will not come."""
        self._stopped = True
        for lane in self._lanes:
            lane.close()
        if self._sink is not None:
            self._sink.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for `stop`; raises what a thread of the server raised. See `ThreadGroup.wait`."""
        return self._threads.wait(timeout)

    def stop(self) -> None:
        """Ends every session, the sink and the threads. May be called twice.

        Raises:
          TimeoutError: a thread did not end.
        """
        with self._lock:
            self._stopped = True
            for session in set(self._sessions.values()):
                self._forget(session, service.Unavailable("the inference server is stopped"))
        self._ready.set()
        self._abandon()
        self._threads.join(timeout=10.0)
        self._threads.finish()


class _Session:
    """The environments of one actor at an inference server."""

    def __init__(
        self,
        server: InferenceServer,
        lane: "_Lane",
        hello: service.Hello,
        slots: list[int],
        incarnations: list[int],
    ) -> None:
        self.name = hello.actor_id
        self.environment_ids = hello.environment_ids
        self.lane = lane
        self.slots = slots
        self.incarnations = incarnations
        self.alive = True
        self.started = False  # Whether there was a request.
        self._server = server
        self._reason: service.PolicyServiceError | None = None
        self._pending: batcher_lib.Request | None = None
        self._unanswered = False
        self._index = 0
        self._evaluate = _EVALUATE if hello.evaluate else 0
        self._timeout = lane.config.step_timeout
        self._header = np.zeros((len(slots), _COLUMNS), np.int32)
        self._header[:, _SLOT] = slots
        self._header[:, _ENVIRONMENT] = hello.environment_ids
        self._header[:, _INCARNATION] = incarnations
        self._header[:, _FLAGS] = _FRESH | self._evaluate
        self._header[:, _KEY:] = _session_keys(
            lane.config.seed, self._header[:, [_ENVIRONMENT, _INCARNATION]]
        ).view(np.int32)
        leaves = tree.flatten_with_path(specs.time_step_spec(lane.spec))
        self._leaf_count = len(leaves)
        self._floats = [
            (path, number)
            for number, (path, leaf) in enumerate(leaves)
            if np.dtype(leaf.dtype).kind == "f"
        ]

    def step(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> types.Nested:
        """See `service.Session.step`."""
        self.send(time_steps, timeout)
        return self.receive(timeout)

    def send(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> None:
        """See `service.Session.send`."""
        if self._unanswered:
            raise service.Unavailable("the session waits for an answer already")
        self.started = True
        self._header[:, _STEP : _STEP + 2] = _halves(self._index)
        with self._until(self._timeout if timeout is None else timeout) as seconds:
            self._pending = self._submit(time_steps, seconds)
            self._unanswered = True
            if self._reason is not None:  # Ended while the request was on its way.
                self._pending.cancel(self._reason)

    def receive(self, timeout: float | None = None) -> types.Nested:
        """See `service.Session.receive`."""
        with self._until(self._timeout if timeout is None else timeout) as seconds:
            if self._pending is None or not self._unanswered:
                raise service.Unavailable("the session waits for no answer")
            if self.lane.config.inline:
                self.lane.turn()
            actions = self._pending.result(seconds)
        self._unanswered = False
        self._index += 1
        self._header[:, _FLAGS] = self._evaluate
        return actions

    @contextlib.contextmanager
    def _until(self, timeout: float) -> Iterator[float]:
        """Gives the batcher's errors the names of the service's."""
        if self._reason is not None:
            raise self._reason
        try:
            yield timeout
        except (batcher_lib.BatcherClosed, batcher_lib.RequestCancelled):
            raise self._reason or service.Unavailable("the inference server is stopped") from None
        except batcher_lib.RequestTimeout as error:
            # The answer may still come, to nobody; the session's order is lost, so it ends.
            self.close()
            raise service.Unavailable(f"{self.name}: {error}") from None

    def _submit(self, time_steps: dm_env.TimeStep, timeout: float) -> batcher_lib.Request:
        """Puts a request on its way; a bad one ends the session."""
        try:
            self._check(time_steps)
            return self.lane.batcher.submit(
                (time_steps, self._header), self, timeout, lambda: self._reason is not None
            )
        except ValueError as error:
            self.close()
            raise service.Refused(f"{self.name}: {error}") from None

    def _check(self, time_steps: dm_env.TimeStep) -> None:
        """Keeps values out that would poison a whole batch or its training.

        Structure, shapes and dtypes are the batcher's to check; here they may be anything.

        Raises:
          ValueError: naming the environment and the leaf.
        """
        step_type = np.asarray(time_steps.step_type)
        rows = (len(self.slots),)
        if step_type.shape == rows and (step_type > 2).any():
            row = int(np.argmax(step_type > 2))
            raise ValueError(
                f"environment {self.environment_ids[row]}: step_type must be 0, 1 or 2, got "
                f"{step_type[row]}"
            )
        leaves = tree.flatten(time_steps)
        if len(leaves) != self._leaf_count:
            return
        for path, number in self._floats:
            leaf = leaves[number]
            if leaf.shape[:1] != rows or leaf.dtype.kind != "f":
                continue
            # The sum is finite exactly where all are, but for an overflow; then look closely.
            if not math.isfinite(leaf.sum(dtype=np.float64)) and not np.isfinite(leaf).all():
                row = int(np.argwhere(~np.isfinite(leaf))[0][0])
                where = "/".join(map(str, path))
                raise ValueError(
                    f"environment {self.environment_ids[row]}: {where} is not finite at its step "
                    f"{self._index}"
                )

    def end(self, reason: service.PolicyServiceError) -> bool:
        """Marks the session as over; returns False where it already was."""
        if not self.alive:
            return False
        self.alive = False
        self._reason = reason
        # Wakes a step that waits in another thread, for its answer or for room.
        if self._pending is not None:
            self._pending.cancel(reason)
        self.lane.batcher.wake()
        return True

    def close(self) -> None:
        """See `service.Session.close`."""
        self._server.close_session(self)


@jax.jit
def _fold_session_keys(key: jax.Array, columns: jax.Array) -> jax.Array:
    fold = jax.vmap(jax.random.fold_in)
    keys = jnp.broadcast_to(key, (columns.shape[0], *key.shape))
    return fold(fold(keys, columns[:, 0]), columns[:, 1])


def _session_keys(seed: int, columns: np.ndarray) -> np.ndarray:
    """Returns a key, uint32 `[n, 2]`, for each `(environment id, incarnation)`, int32 `[n, 2]`.

    Folded in once a session: three hashes a row cost a small network's whole step on a CPU.
    """
    return np.asarray(_fold_session_keys(jax.random.PRNGKey(seed), columns))


class _Lane:
    """One inference device: its batcher, its environments' state and its two stages."""

    def __init__(
        self,
        agent: Agent,
        spec: specs.EnvironmentSpec,
        parameters: parameters_lib.ParameterSource,
        sink: tables.UnrollSink | None,
        config: configs.InferenceConfig,
        device: jax.Device,
        observer: StepObserver | None,
    ) -> None:
        self.spec = spec
        self.config = config
        self.free_slots = list(range(config.max_environments))[::-1]
        self.statistics = InferenceStatistics()
        self._parameters = parameters
        self._sink = sink
        self._observer = observer
        self._device = device
        self.in_flight = config.in_flight or (1 if device.platform == "cpu" else 2)
        self._padding_slot = config.max_environments
        self._row_spec = (
            specs.time_step_spec(spec),
            jax.ShapeDtypeStruct((_COLUMNS,), np.dtype(np.int32)),
        )
        self.batcher = batcher_lib.RequestBatcher(
            self._row_spec,
            batcher_lib.BatcherConfig(
                batch_sizes=config.batch_sizes,
                minimum_batch_size=config.minimum_batch_size,
                timeout=config.batch_timeout,
                buffers=self.in_flight + 2,
            ),
        )
        step_spec, state_spec = policy_step_specs(agent, spec)
        layout = records.RecordLayout(step_spec)
        # Large observations are on the host already; all else that is large comes from the device.
        numbers = tree.unflatten_as(step_spec, range(len(tree.flatten(step_spec))))
        observed = tree.flatten(numbers.inputs.observation)
        self._observed = [
            observed.index(number) if number in observed else None for number in layout.large
        ]
        self._assembler = unrolls.UnrollAssembler(
            layout, state_spec, agent.unroll, config.max_environments
        )
        self._episodes = episodes_lib.EpisodeTracker(config.max_environments)
        self._step = jax.jit(_make_step(agent, layout, self._observed), donate_argnums=(1,))
        self._memory = jax.device_put(
            (
                jax.tree_util.tree_map(
                    lambda leaf: jnp.broadcast_to(
                        leaf, (config.max_environments + 1, *leaf.shape[1:])
                    ),
                    agent.policy.initial_state(1),
                ),
                specs.zeros(spec.actions, (config.max_environments + 1,)),
            ),
            device,
        )
        # Memory is donated with every call, so its leaves must not share a buffer.
        self._memory = jax.tree_util.tree_map(jnp.copy, self._memory)
        # A place in flight is taken before a batch is, so that a batch goes on filling meanwhile.
        self._places = threading.Semaphore(self.in_flight)
        self._in_flight: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @property
    def compilations(self) -> int:
        return int(self._step._cache_size())  # type: ignore[attr-defined]

    def warm_up(self, timeout: float) -> None:
        """Compiles and runs every batch size on rows that belong to no environment."""
        _, params = self._parameters.get(self._device, timeout)
        for size in self.config.batch_sizes:
            time_step, header = specs.zeros(self._row_spec, (size,))
            header[:, _SLOT] = self._padding_slot
            outputs, self._memory = self._step(params, self._memory, time_step, header)
            jax.block_until_ready(outputs)

    def close(self) -> None:
        """Wakes both stages for good."""
        self.batcher.close()
        self._places.release()

    def dispatch(self) -> None:
        """First stage: takes batches and gives them to the device."""
        statistics = self.statistics
        try:
            while True:
                started = time.monotonic()
                self._places.acquire()
                batch = self.batcher.next_batch()
                taken = time.monotonic()
                assert batch is not None
                self._in_flight.put(self._give(batch))
                statistics.wait_seconds += taken - started
                statistics.dispatch_seconds += time.monotonic() - taken
        except batcher_lib.BatcherClosed:
            return
        finally:
            self._in_flight.put(None)

    def _give(self, batch: batcher_lib.Batch) -> tuple[Any, ...]:
        """Gives a batch to the device; returns what `_collect` takes."""
        time_step, header = batch.rows
        header[batch.size :, _SLOT] = self._padding_slot
        for request in batch.requests:
            if not request.tag.alive:
                header[request.start : request.stop, _SLOT] = self._padding_slot
        version, params = self._parameters.get(self._device)
        header[:, _VERSION : _VERSION + 2] = _halves(version)
        outputs, self._memory = self._step(params, self._memory, time_step, header)
        return batch, outputs, time_step, header

    def serve(self) -> None:
        """Does both stages, batch by batch, until the lane is closed."""
        statistics = self.statistics
        while True:
            started = time.monotonic()
            try:
                batch = self.batcher.next_batch()
            except batcher_lib.BatcherClosed:
                return
            assert batch is not None
            taken = time.monotonic()
            try:
                given = self._give(batch)
                statistics.wait_seconds += taken - started
                statistics.dispatch_seconds += time.monotonic() - taken
                self._collect(*given)
            except tables.SinkClosed:
                self.close()  # Nobody learns any more, so nobody shall wait for an answer.
                return
            finally:
                batch.release()

    def turn(self) -> None:
        """Does both stages for what waits, in the caller's thread: see `InferenceConfig.inline`."""
        batch = self.batcher.next_batch(timeout=0.0)
        if batch is not None:
            try:
                self._collect(*self._give(batch))
            finally:
                batch.release()

    def collect(self) -> None:
        """Second stage: waits for results, answers, and assembles unrolls."""
        while (item := self._in_flight.get()) is not None:
            try:
                self._collect(*item)
            except tables.SinkClosed:
                self.close()  # Nobody learns any more, so nobody shall wait for an answer.
                return
            finally:
                item[0].release()

    def _collect(
        self,
        batch: batcher_lib.Batch,
        outputs: Any,
        time_step: dm_env.TimeStep,
        header: np.ndarray,
    ) -> None:
        statistics = self.statistics
        started = time.monotonic()
        action, step, states = outputs
        try:
            action = jax.tree_util.tree_map(np.asarray, action)
        except BaseException as error:
            batch.fail(error)
            raise
        ready = time.monotonic()
        self._places.release()
        batch.complete(action)
        size = batch.size
        statistics.batches += 1
        statistics.rows += size
        statistics.padded_rows += batch.padded_size
        statistics.device_seconds += ready - started

        rows: Any = slice(0, size)
        slots = header[:size, _SLOT].astype(np.intp)
        over = slots == self._padding_slot
        if over.any():  # Rows of sessions that are over.
            rows = np.flatnonzero(~over)
            slots = slots[rows]
        flags = header[rows, _FLAGS]
        evaluate = (flags & _EVALUATE) != 0
        if flags.any():
            fresh = slots[(flags & _FRESH) != 0]
            if len(fresh):
                self._episodes.reset(fresh)
                statistics.dropped_steps += self._assembler.reset(fresh)
        step_type = time_step.step_type[rows]
        ended = self._episodes.append(
            slots, step_type, time_step.reward[rows], header[rows, _ENVIRONMENT], evaluate
        )
        if evaluate.any():
            training = np.flatnonzero(~evaluate)
            rows = training if isinstance(rows, slice) else rows[training]
            slots, step_type = slots[training], step_type[training]
        agent_steps = int(np.count_nonzero(step_type))
        statistics.agent_steps += agent_steps
        if self._observer is not None:
            self._observer.observe(agent_steps, ended)
        whole = None
        if self._sink is not None:
            observation = tree.flatten(time_step.observation)
            from_device = iter(step.large)
            large = (
                np.asarray(next(from_device)) if place is None else observation[place]
                for place in self._observed
            )
            packed = records.Records(
                np.asarray(step.small)[rows], tuple(leaf[rows] for leaf in large)
            )
            whole = self._assembler.append(
                slots, packed, jax.tree_util.tree_map(lambda leaf: _Rows(leaf, rows), states)
            )
        assembled = time.monotonic()
        statistics.assemble_seconds += assembled - ready
        if whole is not None and self._sink is not None:
            statistics.unrolls += len(whole.inputs.reward)
            self._sink.insert(whole)
            statistics.insert_seconds += time.monotonic() - assembled


class _Rows:
    """Some rows of a device array, copied to the host only if somebody looks."""

    def __init__(self, leaf: jax.Array, rows: Any) -> None:
        self._leaf = leaf
        self._rows = rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        array = np.asarray(self._leaf)[self._rows]
        return array if dtype is None else array.astype(dtype)


def _make_step(
    agent: Agent, layout: records.RecordLayout, observed: Sequence[int | None]
) -> Callable[..., Any]:
    """Returns the function that one device call computes.

    `(params, memory, time_step [B], header [B, C]) -> ((action, step, state before the step),
    memory)`; the step is packed, without the large leaves that are `observed`. Memory is
    `(recurrent state, previous action)`, leaves `[slots + 1, ...]`, whose last row belongs to
    padding.
    """

    def step(
        params: Any,
        memory: Any,
        time_step: dm_env.TimeStep,
        header: Any,
    ) -> Any:
        slots = header[:, _SLOT]
        fresh = (header[:, _FLAGS] & _FRESH) != 0
        first = time_step.step_type == int(dm_env.StepType.FIRST)
        batch = slots.shape[0]

        def where_fresh(fresh_rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(fresh_rows.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

        state, previous_action = jax.tree_util.tree_map(lambda leaf: leaf[slots], memory)
        restart = fresh | first
        state = jax.tree_util.tree_map(
            lambda new, old: where_fresh(restart, new, old),
            agent.policy.initial_state(batch),
            state,
        )
        previous_action = jax.tree_util.tree_map(
            lambda old: where_fresh(restart, jnp.zeros_like(old), old), previous_action
        )
        # A row's random stream belongs to its environment, incarnation and step alone.
        keys = jax.lax.bitcast_convert_type(header[:, _KEY:], jnp.uint32)
        keys = jax.vmap(jax.random.fold_in)(keys, header[:, _STEP] & _STEP_MASK)
        inputs = types.PolicyInput(
            time_step.step_type,
            time_step.reward,
            time_step.discount,
            time_step.observation,
            previous_action=previous_action,
            environment_id=header[:, _ENVIRONMENT],
            evaluate=(header[:, _FLAGS] & _EVALUATE) != 0,
        )
        output = agent.policy.step(params, keys, inputs, state)
        action = jax.tree_util.tree_map(
            lambda leaf, like: jnp.asarray(leaf, like.dtype), output.action, previous_action
        )
        memory = jax.tree_util.tree_map(
            lambda stored, new: stored.at[slots].set(new), memory, (output.state, action)
        )
        halves: Any = jnp.zeros((batch, 2), jnp.int32)
        packed = layout.pack(
            types.Unroll(
                inputs=inputs,
                action=action,
                extras=output.extras,
                initial_state=(),
                info=types.UnrollInfo(
                    policy_version=header[:, _VERSION : _VERSION + 2],
                    step_index=header[:, _STEP : _STEP + 2],
                    incarnation=halves.at[:, 0].set(header[:, _INCARNATION]),
                ),
            )
        )
        large = tuple(
            leaf for leaf, place in zip(packed.large, observed, strict=True) if place is None
        )
        return (action, packed._replace(large=large), state), memory

    return step
