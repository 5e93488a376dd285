"""The settings of the R2D2 agent."""

import dataclasses
import math

import tree

from seedlib import specs
from seedlib.agents import choices, discrete


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the R2D2 agent; the defaults suit small tasks, `atari_config` is the published.

    Attributes:
      unroll_length: T, transitions per sequence that are learnt from.
      burn_in: steps in front of them that only warm up the recurrent state.
      unroll_period: steps between the starts of an environment's sequences; None for
        `unroll_length`, so that no two sequences hold the same transition to learn from.
      batch_size: sequences per update.
      n_step: n, rewards in a target before it bootstraps; fewer at the end of a sequence.
      discount: gamma, multiplied by the environment's own discount.
      rescaling_epsilon: of the rescaling of values, see `losses.signed_hyperbolic`; None leaves
        values as they are.
      target_period: updates after which the target network becomes a copy of the other.
      exploration: the environment with id 0 acts at random with this probability ...
      exploration_exponent: ... the one with the last id with this power of it, and those between
        with powers on an even scale. Evaluated environments never do.
      num_environments: how many ids that scale is for. Further ids begin it again, so an
        environment has the same probability whenever it is started.
      replay_capacity: most sequences in the replay (not steps, not bytes).
      replay_minimum: sequences in the replay before the first update.
      samples_per_sequence: how often a sequence is learnt from, on average.
      priority_exponent: sequences are sampled in proportion to this power of their priority.
      importance_exponent: how far that is corrected for by weights, 0 for not at all, 1 fully.
      priority_eta: priority is eta times the largest absolute error of a sequence plus 1 - eta
        times their mean.
      reward_scale: rewards are multiplied by it ...
      reward_clip: ... and then clipped to `[-reward_clip, reward_clip]`; None for not at all.
      learning_rate: step size of Adam.
      adam_epsilon: Adam's, added to the root.
      beta1: Adam's decay of the first moment.
      beta2: Adam's decay of the second moment.
      max_gradient_norm: gradients are scaled down to this global norm; None for not at all.
      torso: `mlp`, `shallow` or `deep`; None chooses by the observation.
      hidden_sizes: layers of the `mlp`; may be empty.
      lstm_size: units of the recurrent core; None for no recurrence.
      dueling_size: units of the hidden layer of each stream (value and advantage).
      use_previous_action: the network also sees the previous action.
      use_previous_reward: the network also sees the last reward (clipped like the others).
      compute_dtype: dtype of activations, `float32` or `bfloat16`; parameters stay float32.
    """

    unroll_length: int = 20
    burn_in: int = 5
    unroll_period: int | None = None
    batch_size: int = 32
    n_step: int = 3
    discount: float = 0.99
    rescaling_epsilon: float | None = 1e-3
    target_period: int = 100
    exploration: float = 0.4
    exploration_exponent: float = 8.0
    num_environments: int = 8
    replay_capacity: int = 5_000
    replay_minimum: int = 50
    samples_per_sequence: float = 4.0
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    priority_eta: float = 0.9
    reward_scale: float = 1.0
    reward_clip: float | None = None
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    max_gradient_norm: float | None = 40.0
    torso: str | None = None
    hidden_sizes: tuple[int, ...] = (64,)
    lstm_size: int | None = 64
    dueling_size: int = 64
    use_previous_action: bool = True
    use_previous_reward: bool = True
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: in one line that names the field and its value.
        """
        for name in (
            "unroll_length", "batch_size", "n_step", "target_period", "num_environments",
            "replay_capacity", "replay_minimum", "dueling_size",
        ):  # fmt: skip
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("burn_in", self.burn_in >= 0, "at least 0")
        period, window = self.unroll_period, self.burn_in + self.unroll_length + 1
        self._check(
            "unroll_period",
            period is None or 1 <= period <= window,
            f"in 1..{window} (burn_in + unroll_length + 1), or None",
        )
        self._check(
            "replay_minimum",
            self.replay_minimum <= self.replay_capacity,
            f"at most replay_capacity ({self.replay_capacity})",
        )
        for name in (
            "discount", "exploration", "priority_exponent", "importance_exponent", "priority_eta",
        ):  # fmt: skip
            self._check(name, 0.0 <= getattr(self, name) <= 1.0, "in 0..1")
        for name in ("beta1", "beta2"):
            self._check(name, 0.0 <= getattr(self, name) < 1.0, "at least 0 and below 1")
        for name in ("samples_per_sequence", "learning_rate", "adam_epsilon"):
            self._check(name, _positive(getattr(self, name)), "positive and finite")
        exponent = self.exploration_exponent
        self._check(
            "exploration_exponent", exponent >= 1.0 and math.isfinite(exponent), "1 or more"
        )
        self._check("reward_scale", math.isfinite(self.reward_scale), "finite")
        for name in ("rescaling_epsilon", "reward_clip", "max_gradient_norm"):
            value = getattr(self, name)
            self._check(name, value is None or _positive(value), "positive and finite, or None")
        size = self.lstm_size
        self._check("lstm_size", size is None or size >= 1, "at least 1, or None")
        self._check("hidden_sizes", all(size >= 1 for size in self.hidden_sizes), "at least 1 each")
        for name, known in (
            ("torso", (None, *choices.TORSOS)),
            ("compute_dtype", choices.COMPUTE_DTYPES),
        ):
            self._check(name, getattr(self, name) in known, f"one of {known}")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")


def atari_config(num_environments: int = 256) -> Config:
    """Returns the published settings for Atari; the torso is `shallow`.

    Args:
      num_environments: how many environments act.
    """
    return Config(
        unroll_length=80,
        burn_in=40,
        batch_size=64,
        n_step=5,
        discount=0.997,
        rescaling_epsilon=1e-3,
        target_period=2_500,
        exploration=0.4,
        exploration_exponent=8.0,
        num_environments=num_environments,
        replay_capacity=50_000,
        replay_minimum=1_000,
        samples_per_sequence=1.0,
        priority_exponent=0.9,
        importance_exponent=0.6,
        priority_eta=0.9,
        learning_rate=1e-4,
        adam_epsilon=1e-3,
        max_gradient_norm=40.0,
        lstm_size=512,
        dueling_size=512,
    )


@dataclasses.dataclass(frozen=True)
class ReplaySettings:
    """What this agent asks of its replay (`Agent.replay`); the fields are those of `Config`.

    Attributes:
      capacity: most sequences.
      minimum: sequences before the first sample.
      samples_per_sequence: how often a sequence is sampled, on average.
      priority_exponent: sequences are sampled in proportion to this power of their priority.
      importance_exponent: a sample's weight is its probability to the power of minus this, but for
        a factor: the agent divides the weights of a batch by the largest.
    """

    capacity: int
    minimum: int
    samples_per_sequence: float
    priority_exponent: float
    importance_exponent: float


def check_environment(environment_spec: specs.EnvironmentSpec) -> None:
    """Refuses environments that this agent cannot act in, without importing JAX.

    Raises:
      ValueError: in one line that names the leaf of the spec.
    """
    actions = environment_spec.actions
    discrete.check(actions)
    leaves = tree.flatten_with_path(actions)
    numbers = sum(len(discrete.bounds(path, leaf)[1]) for path, leaf in leaves)
    if numbers != 1:
        raise ValueError(f"action: must be one number to choose for r2d2, got {numbers}: {actions}")


def _positive(value: float) -> bool:
    return value > 0.0 and math.isfinite(value)
