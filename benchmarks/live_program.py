"""A program running as a user runs it, watched from outside: its figures, CPU time and memory."""

import contextlib
import csv
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil

PROGRAM = "programs.seed"
"""The module that is run."""

LAUNCHER = "launcher"
"""The kind of the process that starts the others."""

_POLL_SECONDS = 0.05
# Imports of all processes and the compiling of a large net, on a slow machine.
_START_TIMEOUT = 300.0
_END_TIMEOUT = 60.0


class Point(NamedTuple):
    """The state of a program when it wrote a row of figures.

    Attributes:
      figures: the row of `train.csv`; cells without a number are left out.
      cpu_seconds: user and system time since the start, by kind of process.
    """

    figures: Mapping[str, float]
    cpu_seconds: Mapping[str, float]

    def since(self, before: "Point", figure: str) -> float:
        """Returns by how much a figure grew."""
        return self.figures[figure] - before.figures.get(figure, 0.0)


class LiveProgram:
    """A running program. See `running`."""

    def __init__(self, flags: Sequence[str], directory: pathlib.Path) -> None:
        """Starts it."""
        self._directory = directory
        self._rows = 0
        self._kinds: dict[int, str] = {}
        with open(directory / "output.txt", "wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    PROGRAM,
                    f"--logdir={directory / 'run'}",
                    # No checkpoint falls into the measured stretch, and the end is told.
                    "--checkpoint_period=86400",
                    f"--num_steps={10**12}",
                    *flags,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self._launcher = psutil.Process(self._process.pid)

    def points(self, seconds: float = float("inf")) -> Iterator[Point]:
        """Yields a point for each new row of figures, as soon as it is there.

        Args:
          seconds: how long.

        Raises:
          RuntimeError: the program has ended; with the end of its output.
          TimeoutError: no row came for long.
        """
        ends_at = time.monotonic() + seconds
        late_at = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < ends_at:
            rows = self._read_rows()
            if len(rows) > self._rows:
                self._rows = len(rows)
                late_at = time.monotonic() + _START_TIMEOUT
                yield Point(rows[-1], self.cpu_seconds())
            if self._process.poll() is not None:
                raise RuntimeError(f"the program ended by itself:\n{self._output_tail()}")
            if time.monotonic() > late_at:
                raise TimeoutError(f"no new figures for {_START_TIMEOUT:.0f} s")
            time.sleep(_POLL_SECONDS)

    def wait_for_update(self) -> Point:
        """Returns the first point after the learner's first update."""
        for point in self.points():
            if point.figures.get("learner_updates", 0) >= 1:
                return point
        raise AssertionError("unreachable")

    def wait(self, seconds: float) -> Point:
        """Returns the first point that is at least `seconds` of the program's time later."""
        first: Point | None = None
        for point in self.points():
            first = first or point
            if point.since(first, "wall_seconds") >= seconds:
                return point
        raise AssertionError("unreachable")

    def _read_rows(self) -> list[dict[str, float]]:
        try:
            text = (self._directory / "run" / "train.csv").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        rows = []
        for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
            figures = {}
            for name, cell in row.items():
                with contextlib.suppress(ValueError, TypeError):  # Text, or a cell left empty.
                    figures[name] = float(cell)
            rows.append(figures)
        return rows

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Returns the running processes by kind: `launcher`, `learner`, `actor`, ..."""
        found = {LAUNCHER: [self._launcher]}
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in self._launcher.children():
                kind = self._kind(worker)
                if kind:
                    found.setdefault(kind, []).append(worker)
        return found

    def _kind(self, worker: psutil.Process) -> str:
        """Returns the kind of a worker, which is the name of the log that it writes."""
        if worker.pid not in self._kinds:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                for file in worker.open_files():
                    path = pathlib.Path(file.path)
                    if path.parent == self._directory / "run" / "logs":
                        self._kinds[worker.pid] = path.stem.partition("-")[0]
        return self._kinds.get(worker.pid, "")

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time so far by kind, what workers start themselves included."""
        used: dict[str, float] = {}
        for kind, workers in self.processes().items():
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    own = [worker] if kind == LAUNCHER else [worker, *worker.children(True)]
                    times = [each.cpu_times() for each in own]
                    used[kind] = used.get(kind, 0.0) + sum(t.user + t.system for t in times)
        return used

    def megabytes(self) -> dict[str, list[float]]:
        """Returns the resident memory of each process by kind."""
        found: dict[str, list[float]] = {}
        for kind, workers in self.processes().items():
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.setdefault(kind, []).append(worker.memory_info().rss / 1e6)
        return found

    def pause(self) -> None:
        """Stands still, all processes of it, until `go_on`."""
        pause(self._launcher)

    def go_on(self) -> None:
        """Ends a `pause`."""
        go_on(self._launcher)

    def stop(self) -> None:
        """Ends the program as a user would."""
        self.go_on()
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Its workers end with it.
            self._process.wait()
            raise TimeoutError(f"the program did not end within {_END_TIMEOUT:.0f} s") from None

    def _output_tail(self) -> str:
        return (self._directory / "output.txt").read_text(errors="replace")[-5000:]


def pause(process: psutil.Process) -> None:
    """Lets a process and those that it started stand still."""
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()


def go_on(process: psutil.Process) -> None:
    """Ends a `pause`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


@contextlib.contextmanager
def running(*flags: str) -> Iterator[LiveProgram]:
    """Runs a program in a folder that is removed afterwards.

    Args:
      *flags: of the program.
    """
    with tempfile.TemporaryDirectory(prefix="seedlib-benchmark-") as folder:
        program = LiveProgram(flags, pathlib.Path(os.path.realpath(folder)))
        try:
            yield program
        finally:
            program.stop()
