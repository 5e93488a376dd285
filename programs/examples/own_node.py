"""A node of one's own: it stands between queue and learner, and keeps the newest batches in files.

python -m programs.examples.own_node --env=catch --num_steps=30000 --logdir=runs/own_node
"""

import pathlib
from collections.abc import Callable
from typing import Any

import launchpad as lp
import numpy as np
import tree

from programs import experiment as experiment_lib
from seedlib import nodes, run_directory
from seedlib.components import tables


class LoggingReader:
    """Hands on a reader's batches, each once, and writes them to files. An `UnrollSource`."""

    def __init__(self, reader: tables.UnrollSource, folder: pathlib.Path, keep: int) -> None:
        """Keeps `keep` files in a folder; goes on with its numbers where a run is resumed."""
        self._reader = reader
        self._folder = folder
        self._keep = keep
        self._number = max((int(path.stem) for path in folder.glob("*.npz")), default=0)

    def __iter__(self) -> "LoggingReader":
        """Returns itself."""
        return self

    def __next__(self) -> tables.Sample:
        """Returns the next batch. A slow disk slows the learner; nothing is left out."""
        sample = next(self._reader)
        named = {"/".join(map(str, p)): x for p, x in tree.flatten_with_path(sample.unrolls)}
        self._number += 1
        unfinished = self._folder / "unfinished"
        with unfinished.open("wb") as file:
            np.savez(file, **named)
        unfinished.rename(self._file(self._number))  # Nobody meets half a file.
        self._file(self._number - self._keep).unlink(missing_ok=True)
        return sample

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `UnrollSource.update_priorities`."""
        self._reader.update_priorities(keys, priorities)

    def close(self) -> None:
        """See `UnrollSource.close`."""
        self._reader.close()

    def _file(self, number: int) -> pathlib.Path:
        return self._folder / f"{number:09d}.npz"


class UnrollLogWorker:
    """To the learner it is the queue: something with a `reader()`."""

    def __init__(self, queue: Any, folder: pathlib.Path, keep: int) -> None:
        """Takes the place of `queue`, a `TrajectoryQueue`."""
        self.component = self  # What a handle of the node stands for.
        self._queue = queue
        self._folder = folder
        self._keep = keep

    def reader(self) -> LoggingReader:
        """Returns a reader of the queue that writes down what it reads."""
        self._folder.mkdir(exist_ok=True)
        return LoggingReader(self._queue.reader(), self._folder, self._keep)

    def run(self, stop: Callable[[], bool]) -> None:
        """Waits for the end: it is the learner that reads."""
        del stop
        lp.wait_for_stop()


class UnrollLog(nodes.Node):
    """Writes what the learner reads to `unrolls` in the run's directory; serves its own process."""

    def __init__(
        self, queue: nodes.Node, directory: run_directory.RunDirectory, keep: int = 20
    ) -> None:
        """Configures the log: `keep` batches, the newest."""
        folder = pathlib.Path(directory.file("unrolls"))
        super().__init__("unroll log", UnrollLogWorker, queue, folder, keep, directory=directory)


def own_node(experiment: experiment_lib.Experiment) -> lp.Program:
    """Returns the graph of `programs/seed.py` with the log in it."""
    queue = experiment.queue()
    log = UnrollLog(queue, experiment.directory)
    learner = experiment.learner(log)
    inference = experiment.inference(learner, queue)

    program = lp.Program("own_node")
    with program.group("learner"):
        program.add_node(nodes.colocate(queue, log, learner, inference))
    with program.group("actor"):
        for index in range(experiment.num_actors):
            program.add_node(experiment.actor(inference, index))
    if experiment.num_evaluators:
        with program.group("evaluator"):
            for index in range(experiment.num_evaluators):
                program.add_node(experiment.evaluator(inference, index))
    return program


if __name__ == "__main__":
    experiment_lib.main("own_node", own_node)
