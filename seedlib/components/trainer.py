"""A learner with what a run needs around it: parameters, counters, checkpoints, progress, an end.

To inference a trainer is where parameters come from (`get`) and where steps are counted
(`observe`), so one handle of it is all that inference needs.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from seedlib import metrics, run_directory
from seedlib.agents.agent import Agent
from seedlib.components import checkpointing, configs, devices, monitor, parameters, tables, threads
from seedlib.components import episodes as episodes_lib
from seedlib.components import inference as inference_lib
from seedlib.components import learner as learner_lib

# A program that ends may close the table a moment before it tells the learner to stop.
_SOURCE_GONE_SECONDS = 5.0


class Trainer:
    """Runs a learner from the newest checkpoint to the end. `run` belongs to one thread."""

    def __init__(
        self,
        agent: Agent,
        source: tables.UnrollSource,
        split: devices.DeviceSplit,
        directory: run_directory.RunDirectory,
        config: configs.TrainerConfig | None = None,
        learner_config: configs.LearnerConfig | None = None,
    ) -> None:
        """Makes the learner, and restores it where the directory holds a checkpoint.

        Args:
          agent: the algorithm.
          source: where batches come from.
          split: which devices infer and which train.
          directory: the run's; prepared.
          config: how the run goes on and ends.
          learner_config: of the learner.

        Raises:
          checkpointing.CheckpointError: the newest checkpoint is of another agent.
        """
        self._config = config or configs.TrainerConfig()
        self._directory = directory
        self._store = parameters.ParameterStore(split.inference)
        self.monitor = monitor.RunMonitor(self._config.num_steps, self._config.action_repeat)
        self.learner = learner_lib.Learner(agent, source, split, self._store, learner_config)
        self._checkpointer = checkpointing.Checkpointer(directory.file("checkpoints"))
        self._inference: list[Callable[[], inference_lib.InferenceStatistics]] = []
        self._restore()
        self._checkpointed = time.monotonic()
        self._logger = metrics.MetricsLogger(directory, "train")
        self._stop_reporting = threading.Event()
        self._threads = threads.ThreadGroup("trainer")

    def _restore(self) -> None:
        checkpoint = self._checkpointer.restore(self.learner.save().state)
        if checkpoint is None:
            return
        counters = checkpoint.counters
        self.learner.restore(
            learner_lib.LearnerState(
                checkpoint.state, counters["updates"], counters["skipped_updates"]
            )
        )
        self.monitor.restore(counters["monitor"])
        logging.info("resumed at update %d", counters["updates"])

    @property
    def updates(self) -> int:
        """The learner's finished updates, those before a restart included."""
        return self.learner.statistics.updates

    def get(
        self, device: jax.Device, timeout: float | None = None
    ) -> parameters.VersionedParameters:
        """See `ParameterSource.get`."""
        return self._store.get(device, timeout)

    def observe(self, agent_steps: int, episodes: episodes_lib.Episodes | None) -> None:
        """See `StepObserver.observe`."""
        self.monitor.observe(agent_steps, episodes)

    def watch(self, statistics: Callable[[], inference_lib.InferenceStatistics]) -> None:
        """Includes an inference server's statistics in the figures."""
        self._inference.append(statistics)

    def figures(self) -> dict[str, Any]:
        """Returns the run's figures as of now."""
        learner = self.learner.statistics
        totals = inference_lib.InferenceStatistics()
        for statistics in self._inference:
            part = statistics()
            for field in dataclasses.fields(part):
                value = getattr(totals, field.name) + getattr(part, field.name)
                setattr(totals, field.name, value)
        stages = {
            _figure_of(field.name): getattr(totals, field.name)
            for field in dataclasses.fields(totals)
            if field.name != "agent_steps"
        }
        return {
            **self.monitor.figures(),
            "num_steps": self._config.num_steps,
            "learner_updates": learner.updates,
            "skipped_updates": learner.skipped_updates,
            "transitions_trained": learner.transitions,
            "policy_lag_mean": learner.lag_sum / learner.lag_count if learner.lag_count else None,
            "policy_lag_max": learner.lag_max,
            "inference_batch_mean": totals.rows / totals.batches if totals.batches else None,
            "learner_wait_seconds": learner.wait_seconds,
            "learner_update_seconds": learner.update_seconds,
            "learner_publish_seconds": learner.publish_seconds,
            **stages,
        }

    def _report(self) -> None:
        """Writes progress until told to stop."""
        while not self._stop_reporting.wait(self._config.report_period):
            self._report_once()

    def _report_once(self) -> None:
        figures = self.figures()
        self._directory.write_progress({**figures, "status": "training"})
        self._logger.write({**figures, **self.learner.metrics()})

    def save(self) -> None:
        """Writes a checkpoint, named after the learner's updates."""
        state = self.learner.save()
        self._checkpointer.save(
            state.updates,
            checkpointing.Checkpoint(
                state.state,
                {
                    "updates": state.updates,
                    "skipped_updates": state.skipped_updates,
                    "monitor": self.monitor.save(),
                },
            ),
        )
        self._checkpointed = time.monotonic()

    def run(self, stop: Callable[[], bool] = lambda: False) -> str:
        """Trains until the step limit or until told to stop; then saves and sums up.

        Args:
          stop: asked at least each second.

        Returns:
          Why it ended: "num_steps" or "stopped".

        Raises:
          BaseException: whatever the learner raised; the summary then says "failed".
        """
        self.monitor.start_clock()
        self._threads.start(self._report, "report")
        reason = "failed"
        try:
            while not (self.monitor.done or stop()):
                self._threads.check()
                if not self.learner.step(timeout=0.2) and self.learner.exhausted:
                    self._wait_for_the_end(stop)
                if time.monotonic() - self._checkpointed > self._config.checkpoint_period:
                    self.save()
            ended = "num_steps" if self.monitor.done else "stopped"
            self.learner.flush()
            self.monitor.finish()
            # The last row of figures is written below, so none may come after it.
            self._stop_reporting.set()
            self._threads.join(timeout=10.0)
            figures = self.figures()
            self.save()
            reason = ended
        finally:
            self._stop_reporting.set()
            if reason == "failed":
                figures = self.figures()
            self._directory.write_summary({**figures, "exit_reason": reason})
            self._threads.join(timeout=10.0)
            self._logger.write({**figures, **self.learner.metrics()})
        return reason

    def _wait_for_the_end(self, stop: Callable[[], bool]) -> None:
        """Waits until a run without a source of batches is told to stop, as it soon should be."""
        deadline = time.monotonic() + _SOURCE_GONE_SECONDS
        while not (self.monitor.done or stop()):
            if time.monotonic() > deadline:
                raise learner_lib.LearnerError(
                    "the source of batches was closed before the end of the run"
                )
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the learner's source and thread, and closes the files. May be called twice."""
        try:
            self.learner.close()
        finally:
            self._logger.close()
            self._checkpointer.close()


def _figure_of(statistic: str) -> str:
    """Returns the figure's name: what crosses the network belongs to the graph as a whole."""
    return statistic if statistic.startswith("network_") else f"inference_{statistic}"
