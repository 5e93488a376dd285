"""A learner and inference in different processes: what each sees of the other.

Inference sees a `RemoteLearner`: parameters come from it, and steps go to it. The learner sees a
`LearnerFront`, which answers for it.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from seedlib.agents.agent import Agent
from seedlib.components import episodes as episodes_lib
from seedlib.components import inference, parameters
from seedlib.components import trainer as trainer_lib
from seedlib.components.transport import learner_client, learner_service


class RemoteLearner:
    """A `ParameterSource` and `StepObserver` across the network. Any thread may use it.

    Inference goes on with the parameters that it has while newer ones are on their way; their
    version travels with each unroll.
    """

    def __init__(
        self,
        address: str,
        agent: Agent,
        config: learner_client.LearnerClientConfig | None = None,
    ) -> None:
        """Starts to look for the learner.

        Args:
          address: of its `LearnerServer`.
          agent: the same as the learner's.
          config: of the client.
        """
        template = jax.eval_shape(
            lambda key: agent.policy_params(agent.init(key)), jax.random.PRNGKey(0)
        )
        leaves, self._structure = jax.tree_util.tree_flatten(template)
        self._client = learner_client.LearnerClient(address, leaves, config)
        self._on_device: dict[jax.Device, parameters.VersionedParameters] = {}
        self._client.start()

    def get(
        self, device: jax.Device, timeout: float | None = None
    ) -> parameters.VersionedParameters:
        """See `ParameterSource.get`.

        Raises:
          service.PolicyServiceError: the learner refuses, or stayed out of reach.
        """
        version, leaves = self._client.newest(timeout)
        held = self._on_device.get(device)
        if held is None or held.version != version:
            params = jax.tree_util.tree_unflatten(self._structure, leaves)
            held = parameters.VersionedParameters(version, jax.device_put(params, device))
            self._on_device[device] = held
        return held

    def observe(self, agent_steps: int, episodes: episodes_lib.Episodes | None) -> None:
        """See `StepObserver.observe`."""
        columns = None
        if episodes is not None:
            columns = {name: values.tolist() for name, values in episodes._asdict().items()}
        self._client.count(agent_steps, columns)

    def watch(self, statistics: Callable[[], inference.InferenceStatistics]) -> None:
        """Sends an inference server's statistics along, for the run's figures.

        To them it adds the bytes of parameters that came from the learner.
        """
        self._client.watch(
            lambda: {
                **dataclasses.asdict(statistics()),
                "network_bytes_parameters": self._client.network_bytes,
            }
        )

    def close(self) -> None:
        """Sends the last report and ends the client."""
        self._client.close()


class LearnerFront:
    """Answers for a trainer in its process. A `learner_service.LearnerService`."""

    def __init__(self, trainer: trainer_lib.Trainer, device: jax.Device) -> None:
        """Joins a trainer's figures.

        Args:
          trainer: who trains and counts.
          device: one of the trainer's inference devices; parameters are read from there.
        """
        self._trainer = trainer
        self._device = device
        self._lock = threading.Lock()
        self._host: tuple[int, list[np.ndarray]] | None = None
        self._received: dict[str, learner_service.Report] = {}
        trainer.watch(self._statistics)

    def newest(self) -> tuple[int, list[np.ndarray]]:
        """See `LearnerService.newest`. Copied to the host once a version, and only if asked for."""
        version, params = self._trainer.get(self._device)
        with self._lock:
            if self._host is None or self._host[0] != version:
                leaves = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(params)]
                self._host = version, leaves
            return self._host

    def receive(self, report: learner_service.Report) -> bool:
        """See `LearnerService.receive`. A report that came already is not counted again."""
        with self._lock:
            last = self._received.get(report.source)
            fresh = last is None or report.sequence > last.sequence
            if fresh:
                self._received[report.source] = report
        if fresh:
            self._trainer.observe(report.agent_steps, _episodes_of(report.episodes))
        return not self._trainer.monitor.done

    def _statistics(self) -> inference.InferenceStatistics:
        """Returns the sum over all inference servers that reported."""
        total = inference.InferenceStatistics()
        with self._lock:
            reports = list(self._received.values())
        for field in dataclasses.fields(total):
            value = sum(report.statistics.get(field.name, 0) for report in reports)
            setattr(total, field.name, type(getattr(total, field.name))(value))
        return total


def _episodes_of(columns: Mapping[str, Sequence[float]]) -> episodes_lib.Episodes | None:
    """Returns the episodes of a report's columns, or None where there are none."""
    if not columns.get("returns"):
        return None
    return episodes_lib.Episodes(
        environment_id=np.asarray(columns["environment_id"], np.int32),
        returns=np.asarray(columns["returns"], np.float64),
        lengths=np.asarray(columns["lengths"], np.int64),
        evaluate=np.asarray(columns["evaluate"], np.bool_),
    )
