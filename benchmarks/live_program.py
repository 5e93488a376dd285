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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil

PROGRAM = "programs.seed"
"""The module that is run where none is named."""

LAUNCHER = "launcher"
"""The kind of the process that starts the others."""

_LOOPBACK = "lo"
_POLL_SECONDS = 0.05
# Imports of all processes and the compiling of a large net, on a slow machine.
_START_TIMEOUT = 300.0
_CONDITION_TIMEOUT = 900.0
_END_TIMEOUT = 60.0


class Point(NamedTuple):
    """The state of a program when it wrote a row of figures.

    Attributes:
      figures: the row of `train.csv`; cells without a number are left out.
      cpu_seconds: user and system time since the start, by kind of process.
      loopback_bytes: all that anyone on this machine sent to it so far.
    """

    figures: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    loopback_bytes: int

    def since(self, before: "Point", figure: str) -> float:
        """Returns by how much a figure grew."""
        return self.figures[figure] - before.figures.get(figure, 0.0)

    def cpu_since(self, before: "Point", kind: str) -> float:
        """Returns the CPU time of one kind of process meanwhile."""
        return self.cpu_seconds.get(kind, 0.0) - before.cpu_seconds.get(kind, 0.0)

    def policy_lag_since(self, before: "Point") -> float | None:
        """Returns the mean lag of the updates meanwhile; None without one.

        The figure is a mean since the start, and every update has as many steps as any other.
        """
        updates = self.since(before, "learner_updates")
        if not updates:
            return None
        sums = [
            point.figures.get("policy_lag_mean", 0.0) * point.figures["learner_updates"]
            for point in (before, self)
        ]
        return (sums[1] - sums[0]) / updates


class LiveProgram:
    """A running program. See `running`."""

    def __init__(
        self, flags: Sequence[str], directory: pathlib.Path, program: str = PROGRAM
    ) -> None:
        """Starts it."""
        self._directory = directory
        self._rows = 0
        self._kinds: dict[int, str] = {}
        with open(directory / "output.txt", "wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    program,
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
                sent = psutil.net_io_counters(pernic=True)[_LOOPBACK].bytes_sent
                yield Point(rows[-1], self.cpu_seconds(), sent)
            if self._process.poll() is not None:
                raise RuntimeError(f"the program ended by itself:\n{self._output_tail()}")
            if time.monotonic() > late_at:
                raise TimeoutError(f"no new figures for {_START_TIMEOUT:.0f} s")
            time.sleep(_POLL_SECONDS)

    def wait_for_update(self) -> Point:
        """Returns the first point after the learner's first update."""
        return self.wait_for(lambda figures: figures.get("learner_updates", 0) >= 1)

    def wait_for(self, condition: Callable[[Mapping[str, float]], bool]) -> Point:
        """Returns the first point whose figures are as they shall be.

        Raises:
          TimeoutError: they did not become so for long.
        """
        for point in self.points(_CONDITION_TIMEOUT):
            if condition(point.figures):
                return point
        raise TimeoutError(f"no such figures within {_CONDITION_TIMEOUT:.0f} s")

    def wait(self, seconds: float, updates: int = 0) -> Point:
        """Returns a later point.

        Args:
          seconds: of the program's time that shall have passed.
          updates: of the learner that shall have been made meanwhile.
        """
        first: Point | None = None
        for point in self.points():
            first = first or point
            passed = point.since(first, "wall_seconds") >= seconds
            if passed and point.since(first, "learner_updates") >= updates:
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

    def megabytes(self, proportional: bool = False) -> dict[str, list[float]]:
        """Returns the memory of each process by kind.

        Args:
          proportional: whether a page counts for each process only as its share among all that
            have it (PSS), so that processes can be added up; else all resident pages count (RSS).
        """
        found: dict[str, list[float]] = {}
        for kind, workers in self.processes().items():
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = (
                        worker.memory_full_info().pss if proportional else worker.memory_info().rss
                    )
                    found.setdefault(kind, []).append(used / 1e6)
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
def running(*flags: str, program: str = PROGRAM) -> Iterator[LiveProgram]:
    """Runs a program in a folder that is removed afterwards.

    Args:
      *flags: of the program.
      program: its module.
    """
    with tempfile.TemporaryDirectory(prefix="seedlib-benchmark-") as folder:
        live = LiveProgram(flags, pathlib.Path(os.path.realpath(folder)), program)
        try:
            yield live
        finally:
            live.stop()
