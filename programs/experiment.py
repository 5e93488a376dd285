"""What every program shares: flags, the parts of a run made from them, and launching.

A program file holds its graph alone; see `programs/seed.py`.
"""

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import launchpad as lp
from absl import app, flags, logging
from launchpad.nodes.python import local_multi_processing as lp_processes

import seedlib
from programs import presets
from seedlib import drawing, environments, launching, nodes, progress, run_directory, specs
from seedlib.agents import loading
from seedlib.components import actor as actor_lib
from seedlib.components import batcher, configs
from seedlib.components import evaluator as evaluator_lib

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "env",
    "gymnasium:CartPole-v1",
    "Environment: catch, gymnasium:<id>, atari:<Game>, bsuite:<id>, synthetic:<HxWxC> or "
    "<module>:<function>.",
)
flags.DEFINE_multi_string("env_option", [], "A setting of the environment, as name=value; repeat.")
flags.DEFINE_string("agent", "vtrace", "Agent: vtrace, or <module>:<function>.")
flags.DEFINE_multi_string("agent_option", [], "A setting of the agent, as name=value; repeat.")
flags.DEFINE_integer("num_actors", None, "Actor processes. Default: by environment.", 1)
flags.DEFINE_integer("envs_per_actor", None, "Environments per actor. Default: by environment.", 1)
flags.DEFINE_integer(
    "pipeline",
    1,
    "Groups of an actor's environments; one steps while the others wait for their actions.",
    1,
)
flags.DEFINE_integer("spare_actors", 1, "Actors that may join the run by hand (programs.join).", 0)
flags.DEFINE_integer("num_evaluators", 0, "Evaluator processes, with greedy actions.", 0)
flags.DEFINE_integer("evaluation_episodes", 10, "Episodes in a round of evaluation.", 1)
flags.DEFINE_float("evaluation_period", 30.0, "Seconds from one round to the next.", 0.0)
flags.DEFINE_integer(
    "num_steps", None, "Agent steps over all training environments. Default: by environment.", 1
)
flags.DEFINE_bool("print_graph", False, "Print the graph as Mermaid text and start nothing.")
flags.DEFINE_integer("seed", 0, "Seed of everything random.", 0, (1 << 31) - 1)
flags.DEFINE_string("logdir", None, "Where the run leaves its files. Required.")
flags.DEFINE_integer(
    "inference_devices", None, "Local devices that infer. Default: a quarter; 0 shares all.", 0
)
flags.DEFINE_list(
    "inference_batch_sizes",
    None,
    "Padded sizes of inference batches, ascending. Default: doubling, from an actor's environments "
    "to all.",
)
flags.DEFINE_integer("minimum_batch_size", 1, "Rows that an inference batch waits for.", 1)
flags.DEFINE_float("batch_timeout", 0.01, "Seconds that it waits for them at most.", 0.0)
flags.DEFINE_integer(
    "queue_capacity", None, "Unrolls in the queue. Default: two batches and one per environment.", 1
)
flags.DEFINE_float("checkpoint_period", 60.0, "Seconds between checkpoints.", 0.001)
flags.DEFINE_float(
    "environment_timeout",
    300.0,
    "Seconds after which an environment that does not come back is taken to hang.",
    0.001,
)
flags.DEFINE_integer(
    "max_restarts", 3, "Restarts of one actor within ten minutes, before the run fails.", 0
)


# Of an experiment's fields, those that are no settings or have other names in its configuration.
_NOT_IN_CONFIG = ("environment", "agent", "directory", "threshold", "run_token")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's parts: what is the same in every graph.

    Attributes:
      program: the graph's name.
      environment: makes environments in actors.
      agent: makes the agent in learner and inference.
      directory: the run's files.
      num_actors: actor processes.
      envs_per_actor: environments in each.
      pipeline: groups that each actor's environments step in; see `ActorConfig`.
      spare_actors: actors that may join a run by hand; central inference has room for them.
      num_evaluators: evaluator processes.
      evaluation_episodes: see `EvaluatorConfig`.
      evaluation_period: see `EvaluatorConfig`.
      num_steps: agent steps.
      seed: of everything random.
      inference_devices: see `split_devices`.
      inference_batch_sizes: see `InferenceConfig`; None lets them double from one actor's
        environments to all.
      minimum_batch_size: see `InferenceConfig`.
      batch_timeout: see `InferenceConfig`.
      queue_capacity: see `TrajectoryQueueConfig`.
      checkpoint_period: seconds between checkpoints.
      environment_timeout: see `ActorConfig`.
      max_restarts: restarts of one actor.
      threshold: the return that counts as solved, for the picture.
      run_token: what inference asks its actors for, so that those of another run that happens to
        get the same port are refused; drawn anew for each run.
    """

    program: str
    environment: environments.EnvironmentFactory
    agent: loading.AgentFactory
    directory: run_directory.RunDirectory
    num_actors: int
    envs_per_actor: int
    num_steps: int
    pipeline: int = 1
    spare_actors: int = 1
    num_evaluators: int = 0
    evaluation_episodes: int = 10
    evaluation_period: float = 30.0
    seed: int = 0
    inference_devices: int | None = None
    inference_batch_sizes: Sequence[int] | None = None
    minimum_batch_size: int = 1
    batch_timeout: float = 0.01
    queue_capacity: int | None = None
    checkpoint_period: float = 60.0
    environment_timeout: float = 300.0
    max_restarts: int = 3
    threshold: float | None = None
    run_token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def config(self) -> dict[str, Any]:
        """Returns everything needed to repeat the run."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _NOT_IN_CONFIG
        }
        return {
            **fields,
            "env": self.environment.name,
            "env_options": dict(self.environment.options),
            "agent": self.agent.name,
            "agent_options": dict(self.agent.options),
            "seedlib": seedlib.__version__,
        }

    def queue(self) -> nodes.TrajectoryQueue:
        """Returns the node of the trajectory queue."""
        return nodes.TrajectoryQueue(
            self.agent,
            self.directory,
            configs.TrajectoryQueueConfig(
                capacity=self.queue_capacity,
                environments=self.num_actors * self.envs_per_actor,
            ),
        )

    def learner(self, queue: nodes.Node) -> nodes.Learner:
        """Returns the learner's node."""
        return nodes.Learner(
            self.agent,
            queue,
            self.directory,
            configs.TrainerConfig(
                num_steps=self.num_steps,
                action_repeat=self.environment.action_repeat,
                checkpoint_period=self.checkpoint_period,
            ),
            configs.LearnerConfig(seed=self.seed),
            self.inference_devices,
            self.run_token,
        )

    def inference(
        self, learner: nodes.Node, queue: nodes.Node, actors: int | None = None
    ) -> nodes.Inference:
        """Returns an inference server's node.

        Args:
          learner: where parameters come from.
          queue: where unrolls go.
          actors: how many actors it serves; None means all.

        Raises:
          ValueError: the batch that it shall wait for is larger than it ever gets, or one that is
            too small for an actor.
        """
        spare_actors = self.spare_actors if actors is None else 0
        actors = self.num_actors if actors is None else actors
        environments_served = (actors + spare_actors) * self.envs_per_actor + self.num_evaluators
        group = -(-self.envs_per_actor // self.pipeline)
        sizes = batcher.padded_sizes(group, actors * self.pipeline)
        if self.inference_batch_sizes is not None:
            sizes = tuple(self.inference_batch_sizes)
        # Checked here, since the server does so when it is made, in another process.
        batcher.BatcherConfig(sizes, self.minimum_batch_size, self.batch_timeout)
        if sizes[-1] < group:
            raise ValueError(
                f"inference_batch_sizes must have one of at least {group}, the environments of an "
                f"actor that step together, got {','.join(map(str, sizes))}"
            )
        return nodes.Inference(
            self.agent,
            learner,
            queue,
            self.directory,
            configs.InferenceConfig(
                # An actor that is replaced before its stream is known to be dead needs room.
                max_environments=environments_served + self.envs_per_actor,
                batch_sizes=sizes,
                minimum_batch_size=self.minimum_batch_size,
                batch_timeout=self.batch_timeout,
                seed=self.seed,
                run_token=self.run_token,
            ),
            self.inference_devices,
        )

    def actor(self, inference: nodes.Node | Sequence[nodes.Node], index: int) -> nodes.Actor:
        """Returns the node of actor `index`, which `inference`, one node or several, serves."""
        first = index * self.envs_per_actor
        return nodes.Actor(
            self.environment,
            inference,
            range(first, first + self.envs_per_actor),
            self.directory,
            actor_lib.ActorConfig(
                environment_timeout=self.environment_timeout,
                run_token=self.run_token,
                pipeline=self.pipeline,
            ),
            name=f"actor {index}",
            seed=self.seed,
            index=index,
        )

    def evaluator(self, inference: nodes.Node, index: int) -> nodes.Evaluator:
        """Returns the node of evaluator `index`: one environment, greedy actions."""
        # Behind those of actors that may join.
        first = (self.num_actors + self.spare_actors) * self.envs_per_actor
        return nodes.Evaluator(
            self.environment,
            inference,
            [first + index],
            self.directory,
            evaluator_lib.EvaluatorConfig(
                episodes=self.evaluation_episodes,
                period=self.evaluation_period,
                actor=actor_lib.ActorConfig(run_token=self.run_token, evaluate=True),
            ),
            name=f"evaluator {index}",
            seed=self.seed,
        )


def from_flags(program: str) -> Experiment:
    """Returns the experiment that the flags describe; makes one environment to look at its spec.

    Raises:
      ValueError: a flag, environment, agent or spec that cannot be; one line for the user.
    """
    if not FLAGS.logdir and not FLAGS.print_graph:
        raise ValueError("--logdir is required: where shall the run leave its files?")
    environment = environments.load(FLAGS.env, **loading.parse_options(FLAGS.env_option))
    preset = presets.preset(FLAGS.env)
    options = {
        **preset.agent.get(FLAGS.agent, {}),
        **loading.parse_options(FLAGS.agent_option),
    }
    spec = look_at(environment)
    agent = loading.AgentFactory(FLAGS.agent, spec, options)
    agent.check()
    if ":" in FLAGS.agent:
        _find_module(FLAGS.agent)
    elif FLAGS.queue_capacity is not None:
        batch_size = loading.config_of(FLAGS.agent, options).batch_size
        if FLAGS.queue_capacity < batch_size:
            raise ValueError(
                f"queue_capacity must be at least one batch ({batch_size} unrolls), got "
                f"{FLAGS.queue_capacity}"
            )

    def choose(flag: int | None, default: int) -> int:
        return default if flag is None else flag

    envs_per_actor = choose(FLAGS.envs_per_actor, preset.envs_per_actor)
    if FLAGS.pipeline > envs_per_actor:
        raise ValueError(
            f"pipeline must be at most the {envs_per_actor} environments of an actor, got "
            f"{FLAGS.pipeline}"
        )
    return Experiment(
        program=program,
        environment=environment,
        agent=agent,
        directory=run_directory.RunDirectory(FLAGS.logdir or "nowhere"),
        num_actors=choose(FLAGS.num_actors, preset.num_actors),
        envs_per_actor=envs_per_actor,
        pipeline=FLAGS.pipeline,
        spare_actors=FLAGS.spare_actors,
        num_steps=choose(FLAGS.num_steps, preset.num_steps),
        num_evaluators=FLAGS.num_evaluators,
        evaluation_episodes=FLAGS.evaluation_episodes,
        evaluation_period=FLAGS.evaluation_period,
        seed=FLAGS.seed,
        inference_devices=FLAGS.inference_devices,
        inference_batch_sizes=_integers("inference_batch_sizes", FLAGS.inference_batch_sizes),
        minimum_batch_size=FLAGS.minimum_batch_size,
        batch_timeout=FLAGS.batch_timeout,
        queue_capacity=FLAGS.queue_capacity,
        checkpoint_period=FLAGS.checkpoint_period,
        environment_timeout=FLAGS.environment_timeout,
        max_restarts=FLAGS.max_restarts,
        threshold=preset.threshold,
    )


def from_config(
    config: Mapping[str, Any], directory: run_directory.RunDirectory, run_token: str
) -> Experiment:
    """Returns the experiment of a run; makes one environment to look at its spec.

    Args:
      config: what `Experiment.config` returned, from a JSON file.
      directory: the run's.
      run_token: the run's.

    Raises:
      ValueError: the environment is not to be had here; one line for the user.
    """
    names = {field.name for field in dataclasses.fields(Experiment)}.difference(_NOT_IN_CONFIG)
    environment = environments.load(config["env"], **from_json(config["env_options"]))
    return Experiment(
        environment=environment,
        agent=loading.AgentFactory(
            config["agent"], look_at(environment), from_json(config["agent_options"])
        ),
        directory=directory,
        run_token=run_token,
        **{name: value for name, value in from_json(config).items() if name in names},
    )


def from_json(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as they were before they were stored as JSON; see `RunDirectory.prepare`."""

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return tuple(item)
        return float(item) if item in ("inf", "-inf", "nan") else item

    return {name: value(item) for name, item in stored.items()}


def _integers(name: str, words: Sequence[str] | None) -> list[int] | None:
    """Returns the numbers of a flag that is a list.

    Raises:
      ValueError: one is no number.
    """
    try:
        return None if words is None else [int(word) for word in words]
    except ValueError:
        raise ValueError(f"{name} must be whole numbers, got {','.join(words or ())}") from None


def _find_module(agent: str) -> None:
    """Refuses an agent of one's own whose module is not there.

    It is not imported: that needs JAX, which takes seconds and is only the learner's to hold.

    Raises:
      ValueError: naming it.
    """
    module = agent.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # A folder above it is no package, or it is no name.
        found = False
    if not found:
        raise ValueError(f"unknown agent {agent!r}: there is no module {module!r}")


def look_at(environment: environments.EnvironmentFactory) -> specs.EnvironmentSpec:
    """Returns an environment's spec; makes one to look at it.

    Raises:
      ValueError: it cannot be made or handled.
    """
    try:
        sample = environment(seed=FLAGS.seed)
        spec = specs.make_environment_spec(sample)
        actor_lib.close_quietly(sample, environment.name)
    except ValueError:
        raise
    except Exception as error:
        # Whoever wrote the environment needs to see where.
        traceback.print_exc()
        raise ValueError(
            f"environment {environment.name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return spec


_LAUNCH_TYPES = ("local_mp", "local_mt", "test_mt")

# What may change when a run goes on: how long, and how it is looked after.
_MAY_DIFFER = (
    "num_steps",
    "checkpoint_period",
    "environment_timeout",
    "max_restarts",
    "spare_actors",
    "num_evaluators",
    "evaluation_episodes",
    "evaluation_period",
    "seedlib",
)


def launch(
    program: lp.Program, experiment: Experiment, launch_type: str | None = None
) -> dict[str, Any]:
    """Runs a program to its end, with a live progress line.

    Args:
      program: the graph.
      experiment: its parts.
      launch_type: Launchpad's; None takes the flag `--lp_launch_type`.

    Returns:
      The summary, and the signal that asked for the end as `signal` (0 for none).

    Raises:
      ValueError: no such launch type.
      run_directory.RunDirectoryError: the directory is of another run, or in use.
      launching.ProgramFailed: a node failed; its first traceback was printed.
      Interrupted: a signal ended it before there was anything to save, or a second one killed it.
    """
    launch_type = launch_type or FLAGS.lp_launch_type
    if launch_type not in _LAUNCH_TYPES:
        raise ValueError(
            f"lp_launch_type must be one of {', '.join(_LAUNCH_TYPES)}, got {launch_type}"
        )
    directory = experiment.directory
    config = experiment.config()
    with contextlib.ExitStack() as claims, progress.ProgressPrinter() as printer:
        # What another run is using is not even looked at.
        goes_on = os.path.exists(directory.file("config.json"))
        if goes_on:
            claims.enter_context(directory.claim())
        resumed = directory.prepare(config, may_differ=_MAY_DIFFER)
        if not goes_on:
            claims.enter_context(directory.claim())
        directory.clear_failures()
        directory.remove_running()  # Of a run that was killed.
        printer.message(f"{'Resuming' if resumed else 'Starting'} in {directory.path}")
        before = directory.read_progress() or {}
        old_summary = _version(directory.file("summary.json"))
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

        def tick() -> None:
            figures = directory.read_progress()
            if figures is not None and figures != before:
                try:
                    printer.update(figures)
                except OSError:  # The terminal is gone; that must not keep a run from its end.
                    _leave(terminals)

        try:
            number = _run(program, experiment, launch_type, tick)
            if number == signal.SIGHUP:
                _leave(terminals)
        except launching.ProgramFailed as error:
            # A restarted actor's failure of long ago is not what ended the program.
            failure = directory.first_failure(error.pid)
            written = _version(directory.file("summary.json")) != old_summary
            figures = (directory.read_summary() if written else directory.read_progress()) or {}
            if written or figures != before:
                directory.write_summary({**figures, "exit_reason": "failed"})
            printer.close()
            what = error.what
            if failure is not None:
                node, trace = failure
                print(f"\n{node} failed:\n{trace}", file=sys.stderr)
                if error.pid is not None:  # A thread's failure says it by itself.
                    what = f"{what}: {trace.strip().splitlines()[-1]}"
            raise launching.ProgramFailed(what, error.log, error.pid) from None
        tick()
        summary = directory.read_summary()
        if summary is None or _version(directory.file("summary.json")) == old_summary:
            if number:
                raise Interrupted(number)
            raise launching.ProgramFailed("the program ended without a summary")
    summary["signal"] = number
    return summary


class Interrupted(Exception):
    """A signal ended a run without a final checkpoint."""

    def __init__(self, number: int) -> None:
        """Keeps the signal's number."""
        super().__init__(f"ended by {signal.Signals(number).name} without a final checkpoint")
        self.number = number


def _leave(terminals: Sequence[int]) -> None:
    """Lets what is written to a closed terminal go nowhere, where it would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _version(path: str) -> tuple[int, int] | None:
    """Returns what changes whenever the file at `path` is written anew; None for no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _run(
    program: lp.Program, experiment: Experiment, launch_type: str, tick: Callable[[], None]
) -> int:
    """Launches, waits, and returns the signal that ended the program or 0."""
    policies = {
        # An actor has nothing to save, and its environments may hang.
        "actor": launching.RestartPolicy(max_restarts=experiment.max_restarts, grace=9.0),
        # Its actors move to another while it is away.
        "inference": launching.RestartPolicy(max_restarts=experiment.max_restarts),
        # Training does not depend on evaluation.
        "evaluator": launching.RestartPolicy(
            max_restarts=experiment.max_restarts, grace=9.0, fatal=False
        ),
    }
    if launch_type == "local_mp":
        directory = experiment.directory
        processes = launching.ProcessProgram(
            program,
            directory.file("logs"),
            resources=resources(program),
            policies=policies,
        )
        directory.write_running(
            {
                "config": experiment.config(),
                "run_token": experiment.run_token,
                "addresses": processes.addresses,
            }
        )
        return processes.run(tick, ending=directory.remove_running)
    return launching.run_threads(program, launch_type, tick, policies)


def resources(program: lp.Program) -> Mapping[str, lp_processes.PythonProcess]:
    """Returns the processes' surroundings: actors leave accelerators and other cores alone."""
    # One thread of XLA for each of learner and inference: on a CPU a pool of threads for every
    # matrix product, or for operations that do not wait for each other, costs more than it gains,
    # and fights the actors for cores.
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": configs.xla_flags(),
    }
    acting = {
        **quiet,
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {
        group: lp_processes.PythonProcess(env=acting if group in ("actor", "evaluator") else quiet)
        for group in program.groups
    }


def finish(experiment: Experiment, summary: Mapping[str, Any]) -> None:
    """Draws the learning curve and says how the run went and where its files are."""
    from seedlib import curve

    directory = experiment.directory
    picture = directory.file("curve.png")
    try:
        curve.draw_curve(
            [directory],
            picture,
            threshold=experiment.threshold,
            title=f"{experiment.environment.name}, {experiment.agent.name}, {experiment.program}",
        )
    except ValueError as error:  # No episode ended: there is nothing to draw.
        picture = f"none ({error})"
    mean = summary.get("return_mean_100")
    print(
        f"{summary['exit_reason']} after {summary['agent_steps']:,} agent steps "
        f"({summary['environment_frames']:,} frames) in {summary['wall_seconds']:.0f} s: "
        f"{summary['steps_per_second']:,.0f} steps/s, mean return of the last 100 episodes "
        f"{'-' if mean is None else format(mean, '.2f')}\n"
        f"curve:   {picture}\nsummary: {directory.file('summary.json')}"
    )


def main(name: str, graph: Callable[[Experiment], lp.Program]) -> None:
    """Runs a program file: parses flags, launches the graph, and exits with a code.

    0 at the step limit; 1 where a node failed; 2 for bad input; 128 + n when signal n ended it (130
    for Ctrl-C, 143 for SIGTERM), after a final checkpoint.

    Args:
      name: the graph's.
      graph: makes it.
    """
    FLAGS.set_default("lp_launch_type", "local_mp")

    def run(arguments: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        if len(arguments) > 1:
            complain(f"unknown argument {arguments[1]!r}")
        try:
            with one_line_errors():
                experiment = from_flags(name)
                program = graph(experiment)
                if FLAGS.print_graph:
                    print(drawing.mermaid(program), end="")
                    return
                summary = launch(program, experiment)
            finish(experiment, summary)
        except launching.ProgramFailed as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        except Interrupted as error:
            print(str(error), file=sys.stderr)
            sys.exit(128 + error.number)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        if summary["exit_reason"] != "num_steps":
            sys.exit(128 + (summary["signal"] or signal.SIGTERM))

    app.run(run, flags_parser=lambda arguments: parse_flags(arguments, _help))


def parse_flags(arguments: Sequence[str], help_text: Callable[[], str]) -> list[str]:
    """Parses flags; what cannot be is one line for the user, and `--help` shows `help_text()`."""
    if any(argument in ("--help", "-help", "-h", "--helpshort") for argument in arguments[1:]):
        print(help_text())
        sys.exit(0)
    try:
        return FLAGS(arguments)
    except flags.Error as error:
        complain(" ".join(str(error).split()))
        raise


def _help() -> str:
    """Returns what `--help` shows: a program's own flags, and not those of every library."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    shown = [*FLAGS.flags_by_module_dict()[__name__], FLAGS["lp_launch_type"]]
    for flag in shown:
        about = None
        if flag.name == "lp_launch_type":
            about = (
                "local_mp: processes; local_mt: threads; test_mt: threads, and nodes must pickle."
            )
        lines += describe_flag(flag, about)
    lines += ["", "Exit code: 0 at the step limit, 1 where something failed, 2 for bad input,"]
    lines += ["128 + n when signal n ended the run (after a final checkpoint)."]
    return "\n".join(lines)


def describe_flag(flag: flags.Flag, about: str | None = None) -> list[str]:
    """Returns the lines of one flag in what `--help` shows; `about` instead of its own help."""
    default = "" if flag.default in (None, []) else f" (default: {flag.default})"
    # absl adds a line of its own to flags that may be repeated.
    about = about or flag.help.partition(";\n")[0]
    return [f"  --{flag.name}", f"      {about}{default}"]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can cause into one line and exit code 2."""
    try:
        yield
    except (ValueError, run_directory.RunDirectoryError) as error:
        complain(" ".join(str(error).split()))


def complain(text: str) -> None:
    """Says in one line what a user can mend, and exits with code 2."""
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)
