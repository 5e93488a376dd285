"""Evaluation: plays whole episodes with a checkpoint that a run of any program has left.

python -m programs.evaluate --logdir=runs/catch-1 --episodes=100 --json=catch-1.json

Agent and environment are those of the run; --env and --env_option name another environment, or
other settings of the same one. Actions are the likeliest ones, or drawn as in training with
--sampled. The run may still be going on: nothing in its directory is changed.
"""

import functools
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import numpy as np
import tree
from absl import app, flags, logging

from programs import experiment
from seedlib import environments, run_directory, specs, types
from seedlib.agents import loading
from seedlib.agents.agent import Agent
from seedlib.components import actor as actor_lib
from seedlib.components import configs
from seedlib.components import episodes as episodes_lib

FLAGS = flags.FLAGS

flags.DEFINE_integer("episodes", 10, "Whole episodes to play.", 1)
flags.DEFINE_bool("sampled", False, "Draw actions as in training; else the likeliest is taken.")
flags.DEFINE_integer("checkpoint", None, "Number of the checkpoint. Default: the newest.", 0)
flags.DEFINE_string("json", None, "A new file for the figures.")
flags.DEFINE_string(
    "video", None, "A new .gif or .mp4 file for episode 1, where observations are images."
)

_SHOWN = (
    *("logdir", "episodes", "sampled", "seed", "checkpoint", "json", "video"),
    *("env", "env_option"),
)
# Environments that are played at once: enough for a batch, few enough for the memory of simulators.
_MAX_ENVIRONMENTS = 16
_FRAMES_PER_SECOND = 15
# Smaller images are enlarged, by whole numbers, as long as they stay within this many pixels.
_VIDEO_SIZE = 160


class Episode(NamedTuple):
    """A whole episode.

    Attributes:
      total: the sum of unclipped rewards.
      length: agent steps.
    """

    total: float
    length: int


class EpisodeLog:
    """Keeps exactly `wanted` episodes. A `StepObserver`.

    Episode k of environment e of E has number `k * E + e`, and the numbers below `wanted` count.
    Which ones these are is settled before any is played, so short ones are not preferred.
    """

    def __init__(
        self, wanted: int, size: int, report: Callable[[int, Episode], None] = lambda *_: None
    ) -> None:
        """Starts without an episode.

        Args:
          wanted: episodes to keep.
          size: E, environments, with ids 0 to E - 1.
          report: takes number and episode of each that counts, as they end.
        """
        self._wanted = wanted
        self._size = size
        self._report = report
        self._ended = [0] * size
        self._kept: dict[int, Episode] = {}

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return len(self._kept) == self._wanted

    @property
    def episodes(self) -> list[Episode]:
        """Those that have ended, by number."""
        return [self._kept[number] for number in sorted(self._kept)]

    def observe(self, agent_steps: int, episodes: episodes_lib.Episodes | None) -> None:
        """See `StepObserver.observe`."""
        del agent_steps
        if episodes is None:
            return
        for environment, total, length in zip(
            episodes.environment_id, episodes.returns, episodes.lengths, strict=True
        ):
            number = self._ended[environment] * self._size + int(environment)
            self._ended[environment] += 1
            if number < self._wanted:
                self._kept[number] = Episode(float(total), int(length))
                self._report(number, self._kept[number])


class RecordedEnvironments:
    """Environments that keep the images of episode 1: a `BatchedEnvironment` around another.

    Attributes:
      frames: what the first environment showed, from FIRST to LAST.
    """

    def __init__(self, environment: actor_lib.BatchedEnvironment) -> None:
        """Wraps environments whose observations are images."""
        self.frames: list[np.ndarray] = []
        self._environment = environment
        self._whole = False

    @property
    def size(self) -> int:
        """See `BatchedEnvironment.size`."""
        return self._environment.size

    @property
    def spec(self) -> specs.EnvironmentSpec:
        """See `BatchedEnvironment.spec`."""
        return self._environment.spec

    def step(self, actions: types.Nested | None) -> dm_env.TimeStep:
        """See `BatchedEnvironment.step`."""
        time_steps = self._environment.step(actions)
        if not self._whole:
            step_type = int(time_steps.step_type[0])
            if step_type == int(dm_env.StepType.FIRST):  # Again, where the environment failed.
                self.frames.clear()
            self.frames.append(_newest_image(time_steps.observation[0]))
            self._whole = step_type == int(dm_env.StepType.LAST)
        return time_steps

    def close(self) -> None:
        """See `BatchedEnvironment.close`."""
        self._environment.close()


def _newest_image(observation: np.ndarray) -> np.ndarray:
    """Returns a copy of a colour image `[H, W, 3]`, else of the last (newest) channel `[H, W]`."""
    return np.array(observation if observation.shape[-1] == 3 else observation[..., -1])


def play(
    agent: Agent,
    params: Any,
    environment: actor_lib.BatchedEnvironment,
    log: EpisodeLog,
    sampled: bool = False,
    seed: int = 0,
) -> None:
    """Plays until the log has its episodes; then closes the environments.

    Args:
      agent: the algorithm.
      params: of its policy.
      environment: what to play; made for evaluation.
      log: takes the episodes.
      sampled: whether actions are drawn as in training; else the policy takes its mode.
      seed: of what is drawn.

    Raises:
      actor.EnvironmentFailure: an environment failed too often.
    """
    import jax

    from seedlib.components import inference, parameters

    device = jax.local_devices()[0]
    store = parameters.ParameterStore([device])
    store.publish(0, params)
    server = inference.InferenceServer(
        agent,
        environment.spec,
        store,
        sink=None,
        config=configs.InferenceConfig(
            max_environments=environment.size,
            batch_sizes=(environment.size,),
            seed=seed,
            inline=True,
        ),
        devices=[device],
        observer=log,
    )
    actor = actor_lib.EnvironmentActor(
        environment,
        server,
        range(environment.size),
        "evaluation",
        # To the policy, drawing actions is training; there is no sink that would learn from it.
        actor_lib.ActorConfig(evaluate=not sampled),
    )
    try:
        server.start()
        actor.run(lambda: log.done)
    finally:
        server.stop()


def find_checkpoint(directory: run_directory.RunDirectory, wanted: int | None = None) -> int:
    """Returns the number of a run's checkpoint.

    Args:
      directory: the run's.
      wanted: which one; None means the newest.

    Raises:
      ValueError: it is not there.
    """
    folder = directory.file("checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    # One that is being written has a longer name until it is whole.
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if not numbers:
        raise ValueError(f"logdir {directory.path}: holds no checkpoint (yet)")
    if wanted is not None and wanted not in numbers:
        raise ValueError(
            f"logdir {directory.path}: holds no checkpoint {wanted}, only "
            f"{', '.join(map(str, numbers))}"
        )
    return numbers[-1] if wanted is None else wanted


def restore(directory: run_directory.RunDirectory, number: int, agent: Agent) -> Any:
    """Returns the training state in a checkpoint of a run, on the host.

    Args:
      directory: the run's.
      number: the checkpoint's.
      agent: whose state it is.

    Raises:
      ValueError: it went away, cannot be read, or is of another agent.
    """
    import jax

    from seedlib.components import checkpointing

    folder = directory.file("checkpoints")
    shapes = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
    like = jax.tree_util.tree_map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    # Of a copy: who opens a folder of checkpoints tidies it up, and a run may be writing there.
    with tempfile.TemporaryDirectory(prefix="evaluate-") as copy:
        try:
            shutil.copytree(os.path.join(folder, str(number)), os.path.join(copy, str(number)))
            checkpointer = checkpointing.Checkpointer(copy)
            try:
                checkpoint = checkpointer.restore(like)
            finally:
                checkpointer.close()
        except (OSError, checkpointing.CheckpointError) as error:
            text = str(error).replace(copy, folder)
            raise ValueError(f"checkpoint {number} cannot be used: {text}") from error
    if checkpoint is None:
        raise ValueError(f"checkpoint {number} cannot be used: {folder}/{number} is not whole")
    return checkpoint.state


def read_run(directory: run_directory.RunDirectory) -> dict[str, Any]:
    """Returns a run's configuration.

    Raises:
      ValueError: there is no such run.
      run_directory.RunDirectoryError: it has no configuration that can be read.
    """
    if not os.path.isdir(directory.path):
        raise ValueError(f"logdir {directory.path}: there is no such folder")
    config = directory.read_config()
    for field in ("env", "env_options", "agent", "agent_options"):
        if field not in config:
            raise ValueError(f"{directory.file('config.json')}: has no {field}")
    return config


def _environment(config: Mapping[str, Any]) -> environments.EnvironmentFactory:
    """Returns the environment to play: that of the flags, else the run's."""
    name = FLAGS.env or config["env"]
    options = experiment.from_json(config["env_options"]) if name == config["env"] else {}
    return environments.load(name, **{**options, **loading.parse_options(FLAGS.env_option)})


def figures_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Returns what is printed of some episodes, and what `--json` stores."""
    totals = [episode.total for episode in episodes]
    lengths = [episode.length for episode in episodes]
    return {
        "episodes": len(episodes),
        "return_mean": float(np.mean(totals)),
        "return_median": float(np.median(totals)),
        "return_min": min(totals),
        "return_max": max(totals),
        "length_mean": float(np.mean(lengths)),
        "returns": totals,
        "lengths": lengths,
    }


def _check_new(flag: str, path: str) -> None:
    """Refuses a file that is there already, or that cannot be made.

    Raises:
      ValueError: naming flag and file.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path):
        raise ValueError(f"--{flag}: {path} is there already, and is not overwritten")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"--{flag}: {path} cannot be written: no folder to write in")


def _check_video(path: str, spec: specs.EnvironmentSpec, name: str) -> None:
    """Refuses a video of another kind, and an environment that shows no images.

    Raises:
      ValueError: naming what it is.
    """
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".gif", ".mp4"):
        raise ValueError(f"--video: {path} must end with .gif or .mp4")
    if kind == ".mp4" and importlib.util.find_spec("cv2") is None:
        raise ValueError(f"--video: {path} needs OpenCV, which is not installed; .gif works")
    leaf = spec.observations
    if tree.is_nested(leaf) or np.dtype(leaf.dtype) != np.uint8 or len(leaf.shape) != 3:
        shown = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in tree.flatten(leaf))
        raise ValueError(
            f"--video: environment {name} shows no images (uint8 [height, width, channels]): its "
            f"observation is {shown}"
        )


def write_video(path: str, frames: Sequence[np.ndarray]) -> None:
    """Writes images as a GIF or MP4, by the name of the file.

    Args:
      path: the file.
      frames: uint8, all `[H, W]` or all `[H, W, 3]`.

    Raises:
      ValueError: OpenCV cannot write an MP4 there.
    """
    scale = max(1, _VIDEO_SIZE // max(frames[0].shape[:2]))
    images = [frame.repeat(scale, axis=0).repeat(scale, axis=1) for frame in frames]
    if path.lower().endswith(".gif"):
        from PIL import Image

        first, *rest = map(Image.fromarray, images)
        # An image like the one before is not stored again: that one is shown longer.
        first.save(
            path, save_all=True, append_images=rest, duration=1000 // _FRAMES_PER_SECOND, loop=0
        )
        return
    import cv2

    height, width = images[0].shape[:2]
    codec = cv2.VideoWriter.fourcc(*"mp4v")
    writer = cv2.VideoWriter(path, codec, _FRAMES_PER_SECOND, (width, height))
    if not writer.isOpened():
        raise ValueError(f"--video: OpenCV cannot write {path}; .gif works")
    for image in images:
        code = cv2.COLOR_GRAY2BGR if image.ndim == 2 else cv2.COLOR_RGB2BGR
        writer.write(cv2.cvtColor(image, code))
    writer.release()


def evaluate() -> None:
    """Does what the flags say.

    Raises:
      ValueError: a flag, run, checkpoint or environment that cannot be; one line for the user.
      run_directory.RunDirectoryError: the same.
      actor.EnvironmentFailure: an environment failed too often.
    """
    video, figures_file = _new_files()
    directory = run_directory.RunDirectory(FLAGS.logdir)
    config = read_run(directory)
    number = find_checkpoint(directory, FLAGS.checkpoint)
    environment = _environment(config)
    spec = experiment.look_at(environment)
    if video:
        _check_video(video, spec, environment.name)
    factory = loading.AgentFactory(
        config["agent"], spec, experiment.from_json(config["agent_options"])
    )
    factory.check()

    from seedlib.components import devices

    devices.compute_in_calling_threads()
    agent = factory()
    params = agent.policy_params(restore(directory, number, agent))
    about = {
        "env": environment.name,
        "env_options": environment.options,
        "agent": config["agent"],
        "logdir": directory.path,
        "checkpoint": number,
        "policy": "sampled" if FLAGS.sampled else "greedy",
        "seed": FLAGS.seed,
    }
    print(
        f"{environment.name}, checkpoint {number} of {directory.path}, {about['policy']}, "
        f"seed {FLAGS.seed}",
        flush=True,
    )
    ids = range(min(FLAGS.episodes, _MAX_ENVIRONMENTS))
    played: actor_lib.BatchedEnvironment = actor_lib.SerialEnvironments(
        environment, ids, seed=FLAGS.seed, evaluate=True
    )
    recorded = RecordedEnvironments(played) if video else None
    log = EpisodeLog(FLAGS.episodes, len(ids), _print_episode)
    play(agent, params, recorded or played, log, FLAGS.sampled, FLAGS.seed)
    figures = figures_of(log.episodes)
    _print_figures(figures)
    if recorded is not None:
        write_video(video, recorded.frames)
        print(f"video: {video}")
    if figures_file:
        with open(figures_file, "x", encoding="utf-8") as file:
            json.dump(run_directory.to_json({**about, **figures}), file, indent=2)
            file.write("\n")
        print(f"json: {figures_file}")


def _new_files() -> tuple[str, str]:
    """Checks what can be without the run; returns the files of `--video` and `--json`, "" for none.

    Raises:
      ValueError: a flag that cannot be.
    """
    for flag in FLAGS.flags_by_module_dict()[experiment.__name__]:
        if flag.present and flag.name not in _SHOWN:
            raise ValueError(f"--{flag.name} is a flag of a run, and not of an evaluation")
    if not FLAGS.logdir:
        raise ValueError("--logdir is required: where has a run left its files?")
    video = os.path.expanduser(FLAGS.video or "")
    figures_file = os.path.expanduser(FLAGS.json or "")
    for name, path in (("video", video), ("json", figures_file)):
        if path:
            _check_new(name, path)
    return video, figures_file


def _show(number: float) -> str:
    return format(number, ".10g")


def _print_episode(number: int, episode: Episode) -> None:
    """Says how an episode ended, at once: the next one may take minutes."""
    total = _show(episode.total)
    print(f"episode {number + 1}: return {total}, length {episode.length}", flush=True)


def _print_figures(figures: Mapping[str, Any]) -> None:
    shown = {name: _show(value) for name, value in figures.items() if isinstance(value, float)}
    print(
        f"return: mean {shown['return_mean']}, median {shown['return_median']}, "
        f"min {shown['return_min']}, max {shown['return_max']} "
        f"({figures['episodes']} episodes, mean length {shown['length_mean']})"
    )


def _help() -> str:
    """Returns what `--help` shows: the flags of an evaluation alone."""
    about = {
        "logdir": "Where the run has left its files. Required.",
        "seed": "Seed of the environments, and of the actions that are drawn.",
        "env": "Another environment than the run's, which must suit its agent.",
        "env_option": "Another setting of the environment, as name=value; repeat.",
    }
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    for name in _SHOWN:
        lines += experiment.describe_flag(FLAGS[name], about.get(name))
    lines += ["", "Exit code: 0 when all episodes were played, 1 where something failed, 2 for bad"]
    lines += ["input, 130 for Ctrl-C."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Evaluates, and exits with a code; see `--help`."""
    logging.set_verbosity(logging.WARNING)
    # As in the processes of a run; both are read when JAX is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["XLA_FLAGS"] = configs.xla_flags()
    if len(arguments) > 1:
        experiment.complain(f"unknown argument {arguments[1]!r}")
    try:
        with experiment.one_line_errors():
            evaluate()
    except (actor_lib.EnvironmentFailure, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    FLAGS.set_default("env", None)  # The run's.
    app.run(main, flags_parser=functools.partial(experiment.parse_flags, help_text=_help))
