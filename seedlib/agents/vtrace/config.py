"""The settings of the V-trace agent."""

import dataclasses
import math

from seedlib import specs
from seedlib.agents import choices, discrete

SCHEDULES = ("constant", "linear")
OPTIMIZERS = ("adam", "rmsprop")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the V-trace agent; the names of the numbers are those of the IMPALA paper.

    Attributes:
      unroll_length: T, transitions per unroll.
      batch_size: unrolls per update.
      discount: gamma, multiplied by the environment's own discount.
      lambda_: mixes multi-step and one-step targets, 1 for V-trace as published.
      clip_rho: rho-bar, clips the importance ratio of each temporal difference.
      clip_pg_rho: clips the importance ratio of the policy gradient.
      entropy_cost: weight of the entropy bonus.
      baseline_cost: weight of the value loss, which is half the squared error.
      reward_scale: rewards are multiplied by it ...
      reward_clip: ... and then clipped to `[-reward_clip, reward_clip]`; None for not at all.
      learning_rate: step size of the optimiser, at the start.
      learning_rate_schedule: `constant`, or `linear` to `final_learning_rate`.
      final_learning_rate: step size after `schedule_steps` updates.
      schedule_steps: updates until `final_learning_rate` is reached.
      optimizer: `adam` or `rmsprop`.
      epsilon: the optimiser's (added to the root for adam, under it for rmsprop).
      beta1: adam's decay of the first moment.
      beta2: adam's decay of the second moment.
      decay: rmsprop's decay of the second moment.
      max_gradient_norm: gradients are scaled down to this global norm; None for not at all.
      torso: `mlp`, `shallow` or `deep`; None chooses by the observation.
      hidden_sizes: layers of the `mlp`; may be empty.
      lstm_size: units of a recurrent core; None for none.
      use_previous_action: the network also sees the previous action.
      use_previous_reward: the network also sees the last reward (clipped like the others).
      compute_dtype: dtype of activations, `float32` or `bfloat16`; parameters stay float32.
    """

    unroll_length: int = 20
    batch_size: int = 32
    discount: float = 0.99
    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0
    entropy_cost: float = 0.01
    baseline_cost: float = 0.5
    reward_scale: float = 1.0
    reward_clip: float | None = None
    learning_rate: float = 6e-4
    learning_rate_schedule: str = "constant"
    final_learning_rate: float = 0.0
    schedule_steps: int = 1
    optimizer: str = "adam"
    epsilon: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    decay: float = 0.99
    max_gradient_norm: float | None = 40.0
    torso: str | None = None
    hidden_sizes: tuple[int, ...] = (64, 64)
    lstm_size: int | None = None
    use_previous_action: bool = False
    use_previous_reward: bool = False
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: in one line that names the field and its value.
        """
        for name in ("unroll_length", "batch_size", "schedule_steps"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("discount", "lambda_"):
            self._check(name, 0.0 <= getattr(self, name) <= 1.0, "in 0..1")
        for name in ("beta1", "beta2", "decay"):
            self._check(name, 0.0 <= getattr(self, name) < 1.0, "at least 0 and below 1")
        for name in ("clip_rho", "clip_pg_rho", "epsilon", "learning_rate"):
            self._check(name, _positive(getattr(self, name)), "positive and finite")
        for name in ("entropy_cost", "baseline_cost", "final_learning_rate"):
            value = getattr(self, name)
            self._check(name, value >= 0.0 and math.isfinite(value), "finite and not negative")
        self._check("reward_scale", math.isfinite(self.reward_scale), "finite")
        for name in ("reward_clip", "max_gradient_norm"):
            value = getattr(self, name)
            self._check(name, value is None or _positive(value), "positive and finite, or None")
        size = self.lstm_size
        self._check("lstm_size", size is None or size >= 1, "at least 1, or None")
        self._check("hidden_sizes", all(size >= 1 for size in self.hidden_sizes), "at least 1 each")
        for name, known in (
            ("learning_rate_schedule", SCHEDULES),
            ("optimizer", OPTIMIZERS),
            ("torso", (None, *choices.TORSOS)),
            ("compute_dtype", choices.COMPUTE_DTYPES),
        ):
            self._check(name, getattr(self, name) in known, f"one of {known}")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")


def _positive(value: float) -> bool:
    return value > 0.0 and math.isfinite(value)


def check_environment(environment_spec: specs.EnvironmentSpec) -> None:
    """Refuses environments that this agent cannot act in, without importing JAX.

    Raises:
      ValueError: in one line that names the leaf of the spec.
    """
    discrete.check(environment_spec.actions)
