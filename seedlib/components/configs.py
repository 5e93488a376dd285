"""Settings of the components that import JAX or Reverb: a graph is made where neither is.

Each is checked when it is made, so that what cannot be is refused before anything starts.
"""

import dataclasses
import os

XLA_CPU_FLAGS = (
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
"""Flags of XLA for a process that acts and learns on a CPU: compute where the call is.

By default parts of a computation that do not wait for each other go to a pool of threads. On a few
cores, and with networks whose parts take microseconds, handing them over costs more than that.
"""


def xla_flags() -> str:
    """Returns a value of XLA_FLAGS: `XLA_CPU_FLAGS`, and then the user's own, which count."""
    return f"{XLA_CPU_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()


@dataclasses.dataclass(frozen=True)
class TrajectoryQueueConfig:
    """How large a queue is.

    Attributes:
      capacity: unrolls that the table holds; at least one batch. None means two batches, one that
        is read while another is written, and one unroll of each of `environments`. A longer queue
        means older data.
      environments: environments that fill it. Those of an actor step together, and so their
        unrolls become whole together; a queue without room for them makes actors and learner work
        in turns.
      unrolls_per_item: unrolls in one block; None takes the largest divisor of the batch size whose
        block stays below a megabyte.
      warn_seconds: a writer or reader that waits longer says so in the log, and again each time.
    """

    capacity: int | None = None
    environments: int = 0
    unrolls_per_item: int | None = None
    warn_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        for field in ("capacity", "unrolls_per_item"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if self.environments < 0:
            raise ValueError(f"environments must not be negative, got {self.environments}")
        if self.warn_seconds <= 0:
            raise ValueError(f"warn_seconds must be positive, got {self.warn_seconds}")


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    """How an inference server works.

    Attributes:
      max_environments: environments that may be connected to one inference device.
      batch_sizes: padded sizes of device calls, ascending; each is compiled before the server is
        ready.
      minimum_batch_size: rows that a batch waits for, at most `batch_timeout` seconds.
      batch_timeout: see there.
      in_flight: batches given to a device at once. 1 has one thread do all of a batch's work, which
        spares two hand-offs between threads; None takes 1 on a CPU, where nothing runs beside it,
        and else 2.
      seed: of every random stream.
      step_timeout: seconds after which a request without an answer is an error.
      run_token: what a hello must bring; "" asks for none.
      inline: whether a session's own thread does all work of its step, so that the server has no
        threads; for programs of one thread, which are deterministic.
    """

    max_environments: int
    batch_sizes: tuple[int, ...]
    minimum_batch_size: int = 1
    batch_timeout: float = 0.01
    in_flight: int | None = None
    seed: int = 0
    step_timeout: float = 300.0
    run_token: str = ""
    inline: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        for field in ("max_environments", "in_flight"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        if self.step_timeout <= 0:
            raise ValueError(f"step_timeout must be positive, got {self.step_timeout}")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How a learner works.

    Attributes:
      seed: of the initial state and of every update's random numbers.
      prefetch: batches kept on the devices ahead of their use; 0 has no thread for it, and a step
        takes its batch from the source itself.
      updates_in_flight: updates given to the devices before the oldest must have finished. 1 keeps
        the policy lag lowest; 2 hides the host's work behind the devices'.
      max_skipped_updates: skipped updates in a row that stop the run.
    """

    seed: int = 0
    prefetch: int = 2
    updates_in_flight: int = 1
    max_skipped_updates: int = 3

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {self.prefetch}")
        for field in ("updates_in_flight", "max_skipped_updates"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """How a run goes on and ends.

    Attributes:
      num_steps: agent steps that end it; None trains until told to stop.
      action_repeat: environment frames per agent step.
      checkpoint_period: seconds between checkpoints.
      report_period: seconds between rows of figures.
    """

    num_steps: int | None = None
    action_repeat: int = 1
    checkpoint_period: float = 60.0
    report_period: float = 1.0

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        for field in ("checkpoint_period", "report_period"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
