"""Joining: one more actor for a run that is going on, of seed, impala or inference_pool.

python -m programs.join --logdir=runs/catch-1

It plays what the run's actors play, until the run ends or Ctrl-C; the others go on without it.
"""

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

import seedlib
from programs import experiment as experiment_lib
from programs import impala, inference_pool, seed
from seedlib import launching, run_directory

FLAGS = flags.FLAGS

flags.DEFINE_integer("index", None, "Which actor to be. Default: the first that is free.", 0)

_GRAPHS = {
    "seed": seed.seed,
    "impala": impala.impala,
    "inference_pool": inference_pool.inference_pool,
}
_SHOWN = ("logdir", "index")
_GROUP = "actor"


def find_run(directory: run_directory.RunDirectory) -> dict[str, Any]:
    """Returns how to join the run that is going on in a directory; see `experiment.launch`.

    Raises:
      ValueError: there is none that an actor can join.
      run_directory.RunDirectoryError: its files cannot be read.
    """
    if not os.path.isdir(directory.path):
        raise ValueError(f"logdir {directory.path}: there is no such folder")
    program = directory.read_config().get("program")
    if program not in _GRAPHS:
        raise ValueError(
            f"logdir {directory.path}: holds a run of {program}, which no actor can join; only one "
            f"of {', '.join(_GRAPHS)}"
        )
    running = directory.read_running()
    if running is None:
        raise ValueError(
            f"logdir {directory.path}: no run is going on there, at least none of processes"
        )
    version = running["config"]["seedlib"]
    if version != seedlib.__version__:
        raise ValueError(
            f"logdir {directory.path}: its run is of seedlib {version}, this is seedlib "
            f"{seedlib.__version__}"
        )
    return running


def places(experiment: experiment_lib.Experiment, wanted: int | None) -> Sequence[int]:
    """Returns the actors that may join a run.

    Args:
      experiment: the run's.
      wanted: the only one that shall; None for whichever is free.

    Raises:
      ValueError: the run has no place for it.
    """
    first, end = experiment.num_actors, experiment.num_actors + experiment.spare_actors
    if first == end:
        raise ValueError(
            f"logdir {experiment.directory.path}: its run takes no other actors (--spare_actors=0)"
        )
    if wanted is None:
        return range(first, end)
    if not first <= wanted < end:
        raise ValueError(
            f"index must be in {first}..{end - 1}, the places for actors that join this run, got "
            f"{wanted}"
        )
    return [wanted]


def prepare(
    experiment: experiment_lib.Experiment, running: dict[str, Any], index: int, restarts: int
) -> launching.ProcessProgram:
    """Returns the process of an actor that joins a run, ready to be started.

    Args:
      experiment: the run's.
      running: from `find_run`.
      index: the actor's.
      restarts: how often that actor joined before, so that its environments' streams are others.

    Raises:
      ValueError: the run is of another graph.
    """
    addresses = running["addresses"]
    if "inference" in addresses:
        FLAGS["num_inference_servers"].value = len(addresses["inference"])
    # The same room in all, so that the same environments have the same ids.
    room = experiment.num_actors + experiment.spare_actors
    enlarged = dataclasses.replace(
        experiment, num_actors=index + 1, spare_actors=room - (index + 1)
    )
    program = _GRAPHS[experiment.program](enlarged)
    return launching.ProcessProgram(
        program,
        experiment.directory.file("logs"),
        resources=experiment_lib.resources(program),
        joining=launching.Joining(_GROUP, addresses, restarts),
    )


def join(directory: run_directory.RunDirectory, wanted: int | None = None) -> int:
    """Takes part in a run until it ends.

    Args:
      directory: the run's.
      wanted: which actor to be; None for the first that is free.

    Returns:
      The signal that ended it, or 0 where the run did.

    Raises:
      ValueError: there is no run to join, or no place in it; one line for the user.
      run_directory.RunDirectoryError: the same.
      launching.ProgramFailed: the actor failed, and the run went on.
    """
    running = find_run(directory)
    experiment = experiment_lib.from_config(running["config"], directory, running["run_token"])

    def run_is_over() -> bool:  # Or another has begun.
        return directory.read_running() != running

    with directory.claim_actor(places(experiment, wanted)) as (index, before):
        processes = prepare(experiment, running, index, before)
        log = directory.file(f"logs/{_GROUP}-{index}.log")
        _say(f"Joining the run in {directory.path} as actor {index}; its log is {log}")

        def tick() -> None:
            if run_is_over():
                processes.stop()

        try:
            number = processes.run(tick)
        except launching.ProgramFailed as error:
            if not run_is_over():  # Else it may have failed for that, before it was told.
                raise _explained(error, directory) from None
            _say(str(error))
            number = 0
        _say("Left the run." if number else "The run has ended.")
        return number


def _explained(
    error: launching.ProgramFailed, directory: run_directory.RunDirectory
) -> launching.ProgramFailed:
    """Returns an actor's failure with the last line of its traceback, where there is one."""
    failure = directory.first_failure(error.pid)
    if failure is None:
        return error
    what = f"{error.what}: {failure[1].strip().splitlines()[-1]}"
    return launching.ProgramFailed(what, error.log, error.pid)


def _say(text: str) -> None:
    print(text, flush=True)


def _check_flags() -> None:
    """Refuses flags of a run, which has its own.

    Raises:
      ValueError: naming the flag.
    """
    modules = FLAGS.flags_by_module_dict()
    for module in (experiment_lib.__name__, inference_pool.__name__):
        for flag in modules[module]:
            if flag.present and flag.name not in _SHOWN:
                raise ValueError(f"--{flag.name} is a flag of a run, and not of who joins it")
    if not FLAGS.logdir:
        raise ValueError("--logdir is required: where is the run that shall be joined?")


def _help() -> str:
    """Returns what `--help` shows: the flags of joining alone."""
    about = {"logdir": "Where the run leaves its files. Required."}
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    for name in _SHOWN:
        lines += experiment_lib.describe_flag(FLAGS[name], about.get(name))
    lines += ["", "Exit code: 0 when the run has ended, 1 where the actor failed, 2 for bad input,"]
    lines += ["128 + n when signal n ended it."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Joins a run, and exits with a code; see `--help`."""
    logging.set_verbosity(logging.WARNING)
    if len(arguments) > 1:
        experiment_lib.complain(f"unknown argument {arguments[1]!r}")
    try:
        with experiment_lib.one_line_errors():
            _check_flags()
            number = join(run_directory.RunDirectory(FLAGS.logdir), FLAGS.index)
    except launching.ProgramFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        number = signal.SIGINT
    if number:
        sys.exit(128 + number)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(experiment_lib.parse_flags, help_text=_help))
