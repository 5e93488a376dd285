"""The components as Launchpad nodes and handles.

A node is configured when the graph is built, and makes its component in its worker. A handle
dereferenced in the process that serves its node *is* the component; elsewhere it is a client. So a
topology is decided by `colocate` and by nothing else. This module imports neither JAX nor
TensorFlow nor Reverb: an actor's process loads it too.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import launchpad as lp
from absl import logging
from launchpad import address as lp_address
from launchpad import context as lp_context
from launchpad.launch import worker_manager
from launchpad.nodes import base as lp_base

from seedlib import metrics, run_directory
from seedlib.agents.loading import AgentFactory
from seedlib.components import actor as actor_lib
from seedlib.components import configs, policy_pool
from seedlib.components import evaluator as evaluator_lib

RESTARTS_VARIABLE = "SEEDLIB_RESTARTS"
"""How often the launcher restarted this process; keeps an actor from replaying its streams."""

PROCESS_VARIABLE = "SEEDLIB_PROCESS"
"""The name that the launcher gave this process, `actor-0` for example, for people who look."""

_PARTNER_TIMEOUT = 300.0
# Longer than servers of a pool take to start, one after the other on a small machine.
_POOL_PATIENCE = 60.0


@dataclasses.dataclass
class Placement:
    """Which node this is and in which process it is put.

    Attributes:
      node: an id.
      process: an id that nodes share which `colocate` put together.
      name: for messages.
      users: the nodes that hold a handle of this one.
      lockstep: whether the node's process has one thread; see `lockstep`.
    """

    node: str
    process: str
    name: str
    users: "list[Placement]" = dataclasses.field(default_factory=list, repr=False)
    lockstep: bool = False

    @property
    def serves_others(self) -> bool:
        """Whether a node in another process uses this one, so that it must be reachable."""
        return any(user.process != self.process for user in self.users)

    @property
    def serves_its_own(self) -> bool:
        """Whether a node in the same process uses this one."""
        return any(user.process == self.process for user in self.users)


class _Instances:
    """The components of this process by node. A partner may have to wait for one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._instances: dict[str, Any] = {}

    def put(self, node: str, instance: Any) -> None:
        with self._condition:
            self._instances[node] = instance
            self._condition.notify_all()

    def remove(self, node: str) -> None:
        with self._condition:
            self._instances.pop(node, None)

    def get(self, placement: Placement, stop: threading.Event) -> Any:
        with self._condition:
            for _ in range(int(_PARTNER_TIMEOUT / 0.1)):
                if placement.node in self._instances:
                    return self._instances[placement.node]
                if stop.is_set():
                    raise _Stopped(f"stopped while waiting for {placement.name}")
                self._condition.wait(0.1)
        raise TimeoutError(f"{placement.name} did not start within {_PARTNER_TIMEOUT:.0f} s")


class _Stopped(Exception):
    """The program is ending before the node began."""


_INSTANCES = _Instances()
_CURRENT = threading.local()


class Handle(lp_base.Handle[Any]):
    """A node's component, or a client of it, whichever the place of dereferencing calls for."""

    def __init__(
        self, placement: Placement, address: lp_address.Address | None, remote: Callable[..., Any]
    ) -> None:
        """Made by a node."""
        self._placement = placement
        self._address = address
        self._remote = remote

    @property
    def placement(self) -> Placement:
        """Where the node is."""
        return self._placement

    def dereference(self) -> Any:
        """Returns the component itself in its own process, else a client."""
        if getattr(_CURRENT, "process", None) == self._placement.process:
            return _INSTANCES.get(self._placement, _CURRENT.stop)
        client = self._remote(self._address.resolve() if self._address is not None else None)
        _CURRENT.clients = [*getattr(_CURRENT, "clients", []), client]
        return client


class Node(lp.PyClassNode[Handle, Any]):
    """A component in a graph.

    The worker (what `constructor` returns) has `component`, which handles stand for, and
    `run(stop)`, which returns soon after `stop()` is true. What `run` raises is recorded in the
    run's directory, ends the node, and with it the process.
    """

    def __init__(
        self,
        name: str,
        constructor: Callable[..., Any],
        *args: Any,
        directory: run_directory.RunDirectory | None = None,
        remote: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures a node.

        Args:
          name: for messages.
          constructor: makes the worker; nodes and handles among its arguments are dereferenced.
          *args: its arguments.
          directory: where failures are recorded.
          remote: `remote(address) -> client` for other processes; None where there is none. The
            node that uses a client closes it (`close`) when it has run.
          **kwargs: its arguments; `address` and `placement` are added where there is a `remote`.
        """
        identity = uuid.uuid4().hex
        self.placement = Placement(identity, identity, name)
        self.begun = False
        self._directory = directory
        self._remote = remote or _NoRemote(name)
        self.address: lp_address.Address | None = None
        if remote is not None:
            self.address = lp_address.Address("seedlib")
            kwargs["address"] = self.address
            kwargs["placement"] = self.placement
        # A node among the arguments stands for its handle, so that graphs read as drawings.
        args = tuple(arg.create_handle() if isinstance(arg, Node) else arg for arg in args)
        super().__init__(constructor, *args, **kwargs)
        for handle in self.input_handles:
            handle.placement.users.append(self.placement)
        if self.address is not None:
            self.allocate_address(self.address)

    def create_handle(self) -> Handle:
        """Returns a handle. Handles made before `colocate` follow the node."""
        return self._track_handle(Handle(self.placement, self.address, self._remote))

    def _construct_instance(self) -> Any:
        if self._instance is None:
            worker = super()._construct_instance()
            _INSTANCES.put(self.placement.node, worker.component)
        return self._instance

    def record_failure(self, error: BaseException) -> None:
        """Keeps a failure in the run's directory, where there is one."""
        if self._directory is not None:
            self._directory.record_failure(self.placement.name, error)

    def run(self) -> None:
        """Makes the worker and runs it, in the worker's process or thread."""
        stop = lp.stop_event()
        _CURRENT.process = self.placement.process
        _CURRENT.stop = stop
        _CURRENT.clients = []
        try:
            worker = self._construct_instance()
            self.begun = True
            if self._should_run:
                worker.run(stop.is_set)
        except _Stopped as reason:
            logging.info("%s: %s", self.placement.name, reason)
        except BaseException as error:
            self.record_failure(error)
            raise
        finally:
            # In one process programs may follow one another.
            if self._should_run:
                _INSTANCES.remove(self.placement.node)
                for client in _CURRENT.clients:
                    client.close()


@dataclasses.dataclass(frozen=True)
class _NoRemote:
    """Refuses to be a client of a component that serves its own process only."""

    name: str

    def __call__(self, address: str | None) -> Any:
        raise TypeError(
            f"{self.name} serves its own process only; colocate the node that uses it with it"
        )


class Colocation(lp.MultiThreadingColocation):
    """Launchpad's colocation, but no failure is lost and nobody is left behind.

    Where a node fails the others are told, and waited for: a learner writes its checkpoint and
    summary before the process ends with the failure. Launchpad's own raises at once, and forgets
    what fails after the program was told to stop.
    """

    def run(self) -> None:
        """Runs the nodes as threads of this process; raises the first failure, when all ended."""
        manager = worker_manager.get_worker_manager()
        failures: list[BaseException] = []

        def guard(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> None:
                try:
                    function()
                except BaseException as error:
                    failures.append(error)
                    raise  # The manager then tells the others to stop.

            return run

        group = f"coloc_{id(self)}"
        for node in self.nodes:
            node._launch_context = self._launch_context
            manager.thread_worker(group, guard(node.function))
        ended = threading.Event()
        watch = threading.Thread(
            target=self._leave_early,
            args=(manager.stop_event(), ended, failures),
            name="leave early",
            daemon=True,
        )
        if self._launch_context.launch_type is lp_context.LaunchType.LOCAL_MULTI_PROCESSING:
            watch.start()
        manager.wait([group], raise_error=False)
        ended.set()
        if watch.ident is not None:
            watch.join()
        if failures:
            raise failures[0]

    def _leave_early(
        self, stop: threading.Event, ended: threading.Event, failures: Sequence[BaseException]
    ) -> None:
        """Ends the process where it is told to stop while a node is still being made.

        Then nothing was done that could be saved, and neither an import nor a compiler can be
        interrupted, which together take longer than a person waits.
        """
        while not ended.is_set():
            if stop.wait(0.1):
                if not failures and not all(getattr(node, "begun", True) for node in self.nodes):
                    os._exit(0)
                return


def colocate(*nodes: Node) -> Colocation:
    """Puts nodes in one process, as threads. Their handles then stand for the components.

    Args:
      *nodes: nodes of this library; none of them in a program yet.
    """
    process = uuid.uuid4().hex
    for node in nodes:
        node.placement.process = process
    return Colocation(list(nodes))


class LockStep(Colocation):
    """Nodes in one process and one thread of control: the learner's, which acts for its batches."""

    def run(self) -> None:
        """Makes every worker, and runs the learner's until the end."""
        stop = lp.stop_event()
        _CURRENT.stop = stop
        _CURRENT.clients = []
        nodes: list[Node] = self.nodes
        workers = []
        try:
            for node in nodes:
                _CURRENT.process = node.placement.process
                workers.append(node._construct_instance())
            queue, learner, inference, *actors = workers
            queue.component.act_with([each for actor in actors for each in actor.actors])
            inference.component.start()
            learner.run(stop.is_set)
            # The launcher's signal to stop must not meet an interpreter that is half gone.
            stop.wait(5.0)
        except BaseException as error:
            nodes[0].record_failure(error)
            stop.wait(5.0)  # For the same reason; the exit code would be the signal's.
            raise
        finally:
            for worker in reversed(workers):
                worker.end()
            for node in nodes:
                _INSTANCES.remove(node.placement.node)


def lockstep(
    queue: "TrajectoryQueue", learner: "Learner", inference: "Inference", *actors: "Actor"
) -> LockStep:
    """Puts a whole graph in one process and one thread: deterministic, for debugging and tests.

    A step of the learner steps the actors, in turn, until there is a batch. The queue is then one
    in memory, inference has no threads, and nothing is fetched ahead.

    Args:
      queue: the table.
      learner: its reader.
      inference: its writer.
      *actors: those who act.
    """
    process = uuid.uuid4().hex
    members = [queue, learner, inference, *actors]
    for node in members:
        node.placement.process = process
        node.placement.lockstep = True
    return LockStep(members)


def _local_port(address: lp_address.Address) -> int:
    return lp_address.get_port_from_address(address.resolve())


class _QueueWorker:
    """Serves a trajectory queue."""

    def __init__(
        self,
        agent: AgentFactory,
        config: configs.TrajectoryQueueConfig,
        address: lp_address.Address,
        placement: Placement,
    ) -> None:
        from seedlib.components import devices, local_queue, trajectory_queue

        devices.compute_in_calling_threads()
        layout = _queue_layout(agent, config)
        if placement.lockstep:
            self.component: Any = local_queue.ActingQueue(
                layout.batch_size, layout.batch_size + max(config.environments, layout.items)
            )
        else:
            self.component = trajectory_queue.TrajectoryQueue(
                layout, config, port=_local_port(address)
            )

    def run(self, stop: Callable[[], bool]) -> None:
        """Serves until stopped."""
        del stop
        lp.wait_for_stop()
        self.end()

    def end(self) -> None:
        """Frees the table."""
        self.component.stop()


def _queue_layout(agent: AgentFactory, config: configs.TrajectoryQueueConfig) -> Any:
    from seedlib.components import inference, trajectory_queue

    made = agent()
    if made.replay is not None:
        raise ValueError(f"agent {agent.name} learns from a replay, and this is a queue")
    unroll = inference.unroll_specs(made, agent.environment_spec)
    return trajectory_queue.layout(unroll, made.batch_size, config)


@dataclasses.dataclass(frozen=True)
class _RemoteQueue:
    """Makes a client of a trajectory queue in another process."""

    agent: AgentFactory
    config: configs.TrajectoryQueueConfig

    def __call__(self, address: str) -> Any:
        from seedlib.components import devices, trajectory_queue

        devices.compute_in_calling_threads()
        return trajectory_queue.TrajectoryQueueClient(
            address, _queue_layout(self.agent, self.config), self.config
        )


class TrajectoryQueue(Node):
    """A FIFO table of unrolls. Its handle has `writer()` and `reader()`."""

    def __init__(
        self,
        agent: AgentFactory,
        directory: run_directory.RunDirectory,
        config: configs.TrajectoryQueueConfig,
    ) -> None:
        """Configures the queue.

        Args:
          agent: makes the agent in the worker.
          directory: the run's.
          config: a `TrajectoryQueueConfig`.
        """
        super().__init__(
            "trajectory queue",
            _QueueWorker,
            agent,
            config,
            directory=directory,
            remote=_RemoteQueue(agent, config),
        )


class _LearnerWorker:
    """Trains, and ends the program when that is over."""

    def __init__(
        self,
        agent: AgentFactory,
        queue: Any,
        directory: run_directory.RunDirectory,
        config: configs.TrainerConfig,
        learner_config: configs.LearnerConfig,
        inference_devices: int | None,
        run_token: str,
        address: lp_address.Address,
        placement: Placement,
    ) -> None:
        from seedlib.components import devices, remote_learner, trainer
        from seedlib.components.transport import learner_server

        devices.compute_in_calling_threads()
        # Without inference in this process all of its devices train.
        split = devices.split_devices(inference_devices if placement.serves_its_own else 0)
        if placement.lockstep:
            learner_config = dataclasses.replace(learner_config, prefetch=0)
        self.component = trainer.Trainer(
            agent(), queue.reader(), split, directory, config, learner_config
        )
        self._server: learner_server.LearnerServer | None = None
        if placement.serves_others:
            self._server = learner_server.LearnerServer(
                remote_learner.LearnerFront(self.component, split.inference[0]),
                learner_server.ServerConfig(
                    address=address.resolve(),
                    # Parameters may be large; how large is known on both sides.
                    max_message_bytes=(1 << 31) - 1,
                    run_token=run_token,
                ),
            )

    def run(self, stop: Callable[[], bool]) -> None:
        """Trains to the end."""
        try:
            if self._server is not None:
                self._server.start()
            self.component.run(stop)
        finally:
            lp.stop()
            self.end()

    def end(self) -> None:
        """Frees learner and files. May be called twice."""
        if self._server is not None:
            self._server.stop()
        self.component.close()


@dataclasses.dataclass(frozen=True)
class _RemoteLearner:
    """Makes a client of a learner in another process."""

    agent: AgentFactory
    run_token: str = dataclasses.field(repr=False)

    def __call__(self, address: str) -> Any:
        from seedlib.components import devices, remote_learner
        from seedlib.components.transport import learner_client

        devices.compute_in_calling_threads()
        return remote_learner.RemoteLearner(
            address,
            self.agent(),
            learner_client.LearnerClientConfig(run_token=self.run_token),
        )


class Learner(Node):
    """The learner. Its handle is where parameters come from and where steps are counted."""

    def __init__(
        self,
        agent: AgentFactory,
        queue: Node | Handle,
        directory: run_directory.RunDirectory,
        config: configs.TrainerConfig,
        learner_config: configs.LearnerConfig,
        inference_devices: int | None = None,
        run_token: str = "",
    ) -> None:
        """Configures the learner.

        Args:
          agent: makes the agent in the worker.
          queue: the table that batches come from.
          directory: the run's.
          config: a `TrainerConfig`.
          learner_config: a `LearnerConfig`.
          inference_devices: how many of the process's devices infer, where inference is in the
            same process; see `split_devices`.
          run_token: what inference in other processes must bring.
        """
        super().__init__(
            "learner",
            _LearnerWorker,
            agent,
            queue,
            directory,
            config,
            learner_config,
            inference_devices,
            run_token,
            directory=directory,
            remote=_RemoteLearner(agent, run_token),
        )


class _InferenceWorker:
    """Serves actions to its own process and to others."""

    def __init__(
        self,
        agent: AgentFactory,
        learner: Any,
        queue: Any,
        config: configs.InferenceConfig,
        inference_devices: int | None,
        learner_placement: Placement,
        address: lp_address.Address,
        placement: Placement,
    ) -> None:
        from seedlib.components import devices, inference
        from seedlib.components.transport import server

        devices.compute_in_calling_threads()
        restarts = int(os.environ.get(RESTARTS_VARIABLE, "0"))
        if restarts:  # Environments begin at incarnation 0 again; their streams must not.
            seed = actor_lib.environment_seed(config.seed, 0, restarts, evaluate=False)
            config = dataclasses.replace(config, seed=seed)
        if placement.lockstep:
            config = dataclasses.replace(config, inline=True)
        beside_learner = learner_placement.process == placement.process
        split = devices.split_devices(inference_devices if beside_learner else 0)
        self._learner = learner
        self._device = split.inference[0]
        self.component = inference.InferenceServer(
            agent(),
            agent.environment_spec,
            learner,
            queue.writer(),
            config,
            split.inference,
            learner,
        )
        self._server: server.PolicyServer | None = None
        if placement.serves_others:
            self._server = server.PolicyServer(
                self.component,
                server.ServerConfig(
                    address=address.resolve(),
                    max_streams=config.max_environments,
                    max_message_bytes=_message_limit(agent, config),
                    run_token=config.run_token,
                ),
            )
        learner.watch(self.component.statistics)

    def run(self, stop: Callable[[], bool]) -> None:
        """Compiles, then serves until stopped."""
        try:
            while not self._has_parameters():
                if stop():
                    return
            self.component.start()
            # What was made to start with stays; TensorFlow alone leaves objects enough for each
            # full collection of garbage to stop every thread for a third of a second.
            gc.collect()
            gc.freeze()
            if self._server is not None:
                self._server.start()
                self._server.set_serving(True)
            while not stop():
                self.component.wait(0.2)
        finally:
            self.end()

    def end(self) -> None:
        """Frees the server."""
        if self._server is not None:
            self._server.stop()
        self.component.stop()

    def _has_parameters(self) -> bool:
        """Waits a little for the first ones: a learner in another process may take its time."""
        try:
            self._learner.get(self._device, timeout=0.5)
        except TimeoutError:
            return False
        return True


def _message_limit(agent: AgentFactory, config: configs.InferenceConfig) -> int:
    """Returns the largest message between an actor and inference, from the spec; in bytes."""
    from seedlib.components.transport import wire

    spec = agent.environment_spec
    return wire.message_limit(spec.observations, spec.actions, config.batch_sizes[-1])


@dataclasses.dataclass(frozen=True)
class _RemotePolicy:
    """Makes a client of an inference server in another process."""

    agent: AgentFactory
    config: configs.InferenceConfig

    def __call__(self, address: str) -> Any:
        from seedlib.components.transport import client

        limit = _message_limit(self.agent, self.config)
        return client.RemotePolicyService(address, client.ClientConfig(max_message_bytes=limit))


class Inference(Node):
    """Central inference. Its handle is a `PolicyService`."""

    def __init__(
        self,
        agent: AgentFactory,
        learner: Node | Handle,
        queue: Node | Handle,
        directory: run_directory.RunDirectory,
        config: configs.InferenceConfig,
        inference_devices: int | None = None,
    ) -> None:
        """Configures the server.

        Args:
          agent: makes the agent in the worker.
          learner: where parameters come from.
          queue: where unrolls go.
          directory: the run's.
          config: an `InferenceConfig`.
          inference_devices: see `split_devices`.
        """
        super().__init__(
            "inference",
            _InferenceWorker,
            agent,
            learner,
            queue,
            config,
            inference_devices,
            learner.placement,
            directory=directory,
            remote=_RemotePolicy(agent, config),
        )


class _ActorWorker:
    """Steps environments."""

    component = None

    def __init__(
        self,
        environment: Callable[[int], Any],
        environment_ids: Sequence[int],
        name: str,
        seed: int,
        index: int,
        config: actor_lib.ActorConfig,
        directory: run_directory.RunDirectory,
        *policies: Any,
    ) -> None:
        self._name = name
        self._config = config
        self._directory = directory
        policy = (
            policies[0]
            if len(policies) == 1
            else policy_pool.PolicyPool(policies, index, patience=_POOL_PATIENCE)
        )
        self._environments = []
        self.actors = []
        for ids in _groups(environment_ids, config.pipeline):
            environments = actor_lib.SerialEnvironments(
                environment,
                ids,
                seed=seed,
                evaluate=config.evaluate,
                max_failures=config.max_failures,
                failure_window=config.failure_window,
                incarnation=int(os.environ.get(RESTARTS_VARIABLE, "0")),
            )
            self._environments.append(environments)
            self.actors.append(actor_lib.EnvironmentActor(environments, policy, ids, name, config))

    def run(self, stop: Callable[[], bool]) -> None:
        """Steps until stopped."""
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), name=f"{self._name}/watch")
        watch.start()
        try:
            with _leave_quietly(stop):
                actor_lib.run_in_turns(self.actors, stop)
        finally:
            ended.set()
            watch.join()

    def end(self) -> None:
        """Frees sessions and environments, of actors that were stepped by others."""
        for actor in self.actors:
            actor.close()

    def _watch(self, ended: threading.Event) -> None:
        """Ends the process where an environment hangs; the launcher then starts it again.

        Nothing can end a call from outside, and the actor's other environments wait for it. Where
        nodes are threads of one process, the process is not the actor's to end: it is only logged.
        """
        timeout = self._config.environment_timeout
        while not ended.wait(min(1.0, timeout / 4)):
            stuck = next(filter(None, (e.stuck(timeout) for e in self._environments)), None)
            if stuck is None:
                continue
            error = TimeoutError(f"{self._name}: {stuck}")
            if PROCESS_VARIABLE not in os.environ:
                logging.log_every_n_seconds(logging.ERROR, "%s", 60, error)
                continue
            faulthandler.dump_traceback()
            self._directory.record_failure(self._name, error)
            os._exit(1)


def _groups(environment_ids: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Yields environments in `count` groups, in order and as equal as can be."""
    start = 0
    for group in range(1, count + 1):
        end = len(environment_ids) * group // count
        yield environment_ids[start:end]
        start = end


@contextlib.contextmanager
def _leave_quietly(stop: Callable[[], bool]) -> Iterator[None]:
    """Lets an actor end without an error when its service ends with the program."""
    from seedlib.components.transport import service

    try:
        yield
    except service.Unavailable:
        # The service may be gone a moment before this process is told to stop.
        if not stop() and not lp.wait_for_stop(5.0):
            raise


class Actor(Node):
    """An environment actor. Nobody needs its handle."""

    def __init__(
        self,
        environment: Callable[[int], Any],
        policies: Node | Handle | Sequence[Node | Handle],
        environment_ids: Sequence[int],
        directory: run_directory.RunDirectory,
        config: actor_lib.ActorConfig,
        name: str = "actor",
        seed: int = 0,
        index: int = 0,
    ) -> None:
        """Configures the actor.

        Args:
          environment: `environment(seed) -> dm_env.Environment`.
          policies: an `Inference` node, or several; see `PolicyPool`.
          environment_ids: one for each environment, unique in the run.
          directory: the run's.
          config: an `ActorConfig`.
          name: for messages.
          seed: the run's.
          index: which of several policies comes first, to spread actors over them.
        """
        several = isinstance(policies, Sequence)
        super().__init__(
            name,
            _ActorWorker,
            environment,
            tuple(environment_ids),
            name,
            seed,
            index,
            config,
            directory,
            *(policies if several else (policies,)),
            directory=directory,
        )


class _EvaluatorWorker:
    """Plays evaluation rounds, and writes their figures to `evaluation.csv`."""

    component = None

    def __init__(
        self,
        environment: Callable[[int], Any],
        policy: Any,
        environment_ids: Sequence[int],
        name: str,
        seed: int,
        config: evaluator_lib.EvaluatorConfig,
        directory: run_directory.RunDirectory,
    ) -> None:
        self._directory = directory
        self._name = name
        self._evaluator = evaluator_lib.Evaluator(
            actor_lib.SerialEnvironments(
                environment,
                environment_ids,
                seed=seed,
                evaluate=True,
                incarnation=int(os.environ.get(RESTARTS_VARIABLE, "0")),
            ),
            policy,
            environment_ids,
            name,
            config,
        )

    def run(self, stop: Callable[[], bool]) -> None:
        """Plays until stopped."""
        logger = metrics.MetricsLogger(
            self._directory, self._name.replace(" ", "-"), tensorboard=False
        )

        def report(figures: dict[str, Any]) -> None:
            progress = self._directory.read_progress() or {}
            logger.write({"agent_steps": progress.get("agent_steps", 0), **figures})

        try:
            with _leave_quietly(stop):
                self._evaluator.run(stop, report, lp.wait_for_stop)
        finally:
            logger.close()


class Evaluator(Node):
    """An evaluator. Nobody needs its handle."""

    def __init__(
        self,
        environment: Callable[[int], Any],
        policy: Node | Handle,
        environment_ids: Sequence[int],
        directory: run_directory.RunDirectory,
        config: evaluator_lib.EvaluatorConfig,
        name: str = "evaluator",
        seed: int = 0,
    ) -> None:
        """Configures the evaluator.

        Args:
          environment: `environment(seed) -> dm_env.Environment`.
          policy: an `Inference` node.
          environment_ids: one for each environment, unique in the run.
          directory: the run's.
          config: how it plays.
          name: for messages, and of its CSV.
          seed: the run's.
        """
        super().__init__(
            name,
            _EvaluatorWorker,
            environment,
            policy,
            tuple(environment_ids),
            name,
            seed,
            config,
            directory,
            directory=directory,
        )
