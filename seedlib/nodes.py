"""The components as Launchpad nodes and handles.

A node is configured when the graph is built, and makes its component in its worker. A handle
dereferenced in the process that serves its node *is* the component; elsewhere it is a client. So a
topology is decided by `colocate` and by nothing else. This module imports neither JAX nor
TensorFlow nor Reverb: an actor's process loads it too.
"""

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import launchpad as lp
from absl import logging
from launchpad import address as lp_address
from launchpad.launch import worker_manager
from launchpad.nodes import base as lp_base

from seedlib import metrics, run_directory
from seedlib.agents.loading import AgentFactory
from seedlib.components import actor as actor_lib
from seedlib.components import configs
from seedlib.components import evaluator as evaluator_lib

RESTARTS_VARIABLE = "SEEDLIB_RESTARTS"
"""How often the launcher restarted this process; keeps an actor from replaying its streams."""

PROCESS_VARIABLE = "SEEDLIB_PROCESS"
"""The name that the launcher gave this process, `actor-0` for example, for people who look."""

_PARTNER_TIMEOUT = 300.0


@dataclasses.dataclass
class Placement:
    """Which node this is and in which process it is put.

    Attributes:
      node: an id.
      process: an id that nodes share which `colocate` put together.
      name: for messages.
    """

    node: str
    process: str
    name: str


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
          **kwargs: its arguments; `address` is added where there is a `remote`.
        """
        identity = uuid.uuid4().hex
        self.placement = Placement(identity, identity, name)
        self._directory = directory
        self._remote = remote or _NoRemote(name)
        self.address: lp_address.Address | None = None
        if remote is not None:
            self.address = lp_address.Address("seedlib")
            kwargs["address"] = self.address
        # A node among the arguments stands for its handle, so that graphs read as drawings.
        args = tuple(arg.create_handle() if isinstance(arg, Node) else arg for arg in args)
        super().__init__(constructor, *args, **kwargs)
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

    def run(self) -> None:
        """Makes the worker and runs it, in the worker's process or thread."""
        stop = lp.stop_event()
        _CURRENT.process = self.placement.process
        _CURRENT.stop = stop
        _CURRENT.clients = []
        try:
            worker = self._construct_instance()
            if self._should_run:
                worker.run(stop.is_set)
        except _Stopped as reason:
            logging.info("%s: %s", self.placement.name, reason)
        except BaseException as error:
            if self._directory is not None:
                self._directory.record_failure(self.placement.name, error)
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
        manager.wait([group], raise_error=False)
        if failures:
            raise failures[0]


def colocate(*nodes: Node) -> Colocation:
    """Puts nodes in one process, as threads. Their handles then stand for the components.

    Args:
      *nodes: nodes of this library; none of them in a program yet.
    """
    process = uuid.uuid4().hex
    for node in nodes:
        node.placement.process = process
    return Colocation(list(nodes))


def _local_port(address: lp_address.Address) -> int:
    return lp_address.get_port_from_address(address.resolve())


class _QueueWorker:
    """Serves a trajectory queue."""

    def __init__(
        self, agent: AgentFactory, config: configs.TrajectoryQueueConfig, address: Any
    ) -> None:
        from seedlib.components import trajectory_queue

        self.component = trajectory_queue.TrajectoryQueue(
            _queue_layout(agent, config), config, port=_local_port(address)
        )

    def run(self, stop: Callable[[], bool]) -> None:
        """Serves until stopped."""
        del stop
        lp.wait_for_stop()
        self.component.stop()


def _queue_layout(agent: AgentFactory, config: configs.TrajectoryQueueConfig) -> Any:
    from seedlib.components import inference, trajectory_queue

    made = agent()
    unroll = inference.unroll_specs(made, agent.environment_spec)
    return trajectory_queue.layout(unroll, made.batch_size, config)


@dataclasses.dataclass(frozen=True)
class _RemoteQueue:
    """Makes a client of a trajectory queue in another process."""

    agent: AgentFactory
    config: configs.TrajectoryQueueConfig

    def __call__(self, address: str) -> Any:
        from seedlib.components import trajectory_queue

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
    ) -> None:
        from seedlib.components import devices, trainer

        self._source = queue.reader()
        self.component = trainer.Trainer(
            agent(),
            self._source,
            devices.split_devices(inference_devices),
            directory,
            config,
            learner_config,
        )

    def run(self, stop: Callable[[], bool]) -> None:
        """Trains to the end."""
        try:
            self.component.run(stop)
        finally:
            lp.stop()
            self.component.close()


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
    ) -> None:
        """Configures the learner.

        Args:
          agent: makes the agent in the worker.
          queue: the table that batches come from.
          directory: the run's.
          config: a `TrainerConfig`.
          learner_config: a `LearnerConfig`.
          inference_devices: how many of the process's devices infer; see `split_devices`.
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
            directory=directory,
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
        address: Any,
    ) -> None:
        from seedlib.components import devices, inference
        from seedlib.components.transport import server

        split = devices.split_devices(inference_devices)
        self.component = inference.InferenceServer(
            agent(),
            agent.environment_spec,
            learner,
            queue.writer(),
            config,
            split.inference,
            learner,
        )
        self._server = server.PolicyServer(
            self.component,
            server.ServerConfig(address=address.resolve(), run_token=config.run_token),
        )
        learner.watch(self.component.statistics)

    def run(self, stop: Callable[[], bool]) -> None:
        """Compiles, then serves until stopped."""
        try:
            self.component.start()
            self._server.start()
            self._server.set_serving(True)
            while not stop():
                self.component.wait(0.2)
        finally:
            self._server.stop()
            self.component.stop()


@dataclasses.dataclass(frozen=True)
class _RemotePolicy:
    """Makes a client of an inference server in another process."""

    def __call__(self, address: str) -> Any:
        from seedlib.components.transport import client

        return client.RemotePolicyService(address)


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
            directory=directory,
            remote=_RemotePolicy(),
        )


class _ActorWorker:
    """Steps environments."""

    component = None

    def __init__(
        self,
        environment: Callable[[int], Any],
        policy: Any,
        environment_ids: Sequence[int],
        name: str,
        seed: int,
        config: actor_lib.ActorConfig,
    ) -> None:
        self._actor = actor_lib.EnvironmentActor(
            actor_lib.SerialEnvironments(
                environment,
                environment_ids,
                seed=seed,
                evaluate=config.evaluate,
                max_failures=config.max_failures,
                failure_window=config.failure_window,
                incarnation=int(os.environ.get(RESTARTS_VARIABLE, "0")),
            ),
            policy,
            environment_ids,
            name,
            config,
        )

    def run(self, stop: Callable[[], bool]) -> None:
        """Steps until stopped."""
        with _leave_quietly(stop):
            self._actor.run(stop)


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
        policy: Node | Handle,
        environment_ids: Sequence[int],
        directory: run_directory.RunDirectory,
        config: actor_lib.ActorConfig,
        name: str = "actor",
        seed: int = 0,
    ) -> None:
        """Configures the actor.

        Args:
          environment: `environment(seed) -> dm_env.Environment`.
          policy: an `Inference` node.
          environment_ids: one for each environment, unique in the run.
          directory: the run's.
          config: an `ActorConfig`.
          name: for messages.
          seed: the run's.
        """
        super().__init__(
            name,
            _ActorWorker,
            environment,
            policy,
            tuple(environment_ids),
            name,
            seed,
            config,
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
