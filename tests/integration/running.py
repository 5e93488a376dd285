"""Runs whole programs as a user does, and looks at their processes from outside."""

import contextlib
import csv
import dataclasses
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
START = 120.0
"""Seconds that a program may take from its start to its first steps, on a busy machine."""
END = 25.0
"""Seconds that it may take to end, on a busy machine; about 3 of them are usual."""


def wait_until(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """Polls until `condition()` is true, and returns what it returned.

    Raises:
      TimeoutError: it was not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.1)
    return value


@dataclasses.dataclass
class Program:
    """A program that was started. `wait` or `kill` ends it.

    Attributes:
      process: the launcher.
      logdir: the run's.
      output: where what the launcher prints goes.
      terminal: the other end of the launcher's terminal; None where it has none.
      workers: every process of the launcher that was ever seen.
    """

    process: subprocess.Popen[bytes]
    logdir: pathlib.Path
    output: pathlib.Path
    terminal: int | None = None
    workers: dict[int, psutil.Process] = dataclasses.field(default_factory=dict)

    def look(self) -> list[psutil.Process]:
        """Returns the launcher's processes that live now; remembers every one ever seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.workers.setdefault(child.pid, child)
        return self.left()

    def left(self) -> list[psutil.Process]:
        """Returns those of the processes ever seen that are still there."""
        return [worker for worker in self.workers.values() if alive(worker)]

    def named(self, title: str) -> psutil.Process:
        """Returns the process of a group and number, `learner-0` for example."""
        found = [worker for worker in self.look() if title_of(worker) == title]
        assert len(found) == 1, (title, [title_of(worker) for worker in self.look()])
        return found[0]

    def figures(self) -> dict[str, Any]:
        """Returns the newest progress; empty before there is any."""
        path = self.logdir / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def summary(self) -> dict[str, Any]:
        """Returns `summary.json`."""
        return json.loads((self.logdir / "summary.json").read_text())

    def wait_for_steps(self, steps: int = 1, timeout: float = START) -> None:
        """Waits until the run has counted so many agent steps."""

        def reached() -> bool:
            assert self.process.poll() is None, f"it has ended:\n{self.text()}"
            return self.figures().get("agent_steps", 0) >= steps

        wait_until(reached, timeout, f"{steps} agent steps; {self.figures()}; {self.text()}")

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows of `train.csv`."""
        with open(self.logdir / "train.csv") as file:
            return list(csv.DictReader(file))

    def checkpoints(self) -> list[int]:
        """Returns the numbers of the whole checkpoints, in order."""
        folder = self.logdir / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher alone."""
        self.look()
        self.process.send_signal(number)

    def close_terminal(self) -> None:
        """Closes the launcher's terminal, for which the system sends it SIGHUP."""
        terminal, self.terminal = self.terminal, None
        if terminal is not None:
            os.close(terminal)

    def wait(self, timeout: float) -> int:
        """Waits for the launcher's end and returns its exit code; looks at its processes."""
        wait_until(
            lambda: self.process.poll() is not None or self.look() is None,
            timeout,
            f"the end of the launcher; {self.figures()}; {self.text()}",
        )
        return self.process.returncode

    def wait_until_gone(self, timeout: float) -> float:
        """Waits until the launcher and all its processes are gone; returns the seconds."""
        started = time.monotonic()
        self.wait(timeout)
        wait_until(lambda: not self.left(), timeout, f"the end of {self.left()}")
        return time.monotonic() - started

    def text(self) -> str:
        """Returns what the launcher has printed."""
        return self.output.read_text(errors="replace")

    def last_lines(self, count: int = 1) -> list[str]:
        """Returns the last lines that the launcher printed."""
        return self.text().strip().splitlines()[-count:]

    def log(self, name: str) -> str:
        """Returns what a process has printed, `actor-0` for example."""
        return (self.logdir / "logs" / f"{name}.log").read_text(errors="replace")

    def kill(self) -> None:
        """Leaves nothing behind, whatever the test did."""
        self.look()
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        self.process.wait()
        self.close_terminal()
        for worker in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def alive(process: psutil.Process) -> bool:
    """Returns whether a process is there; one that has ended and waits to be reaped is not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def title_of(worker: psutil.Process) -> str:
    """Returns the title that the launcher gave a process; "" for one that it did not start."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return worker.environ().get("SEEDLIB_PROCESS", "")
    return ""


SMALL = ("--env=catch", "--num_actors=1", "--envs_per_actor=8", "--agent_option=batch_size=8")


def command(
    logdir: pathlib.Path,
    *arguments: str,
    small: Sequence[str] = SMALL,
    module: str = "programs.seed",
) -> list[str]:
    """Returns the command of a program; later arguments override the `small` ones."""
    return [sys.executable, "-m", module, f"--logdir={logdir}", *small, *arguments]


@contextlib.contextmanager
def started(
    logdir: pathlib.Path,
    *arguments: str,
    small: Sequence[str] = SMALL,
    variables: Mapping[str, str] | None = None,
    terminal: bool = False,
    module: str = "programs.seed",
) -> Iterator[Program]:
    """Starts a program, and leaves nothing of it behind.

    Args:
      logdir: see `command`.
      *arguments: see `command`.
      small: see `command`.
      variables: environment variables, over those that are there.
      terminal: whether to start it in a terminal of its own.
      module: the program.
    """
    output = logdir.parent / f"{logdir.name}.output"
    ours, theirs = os.openpty() if terminal else (None, os.open(output, os.O_WRONLY | os.O_CREAT))
    process = subprocess.Popen(
        command(logdir, *arguments, small=small, module=module),
        cwd=ROOT,
        env={**surroundings(), **(variables or {})},
        stdin=theirs if terminal else subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_take_terminal if terminal else None,  # noqa: PLW1509  One system call.
    )
    os.close(theirs)
    program = Program(process, logdir, output, ours)
    if ours is not None:
        threading.Thread(target=_record, args=(ours, output), daemon=True).start()
    try:
        yield program
    finally:
        program.kill()


def _take_terminal() -> None:
    """Makes the standard input, a terminal, the one whose end this session hears of."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _record(terminal: int, output: pathlib.Path) -> None:
    """Writes to a file what is shown on a terminal, until that is closed."""
    with open(output, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while shown := os.read(terminal, 4096):
            file.write(shown)


def surroundings() -> dict[str, str]:
    """Returns the environment variables of a program: what it needs to find the tests' modules."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def refused(full: list[str]) -> str:
    """Runs a program that must be refused; returns the one line that it says.

    Args:
      full: the whole command.

    Raises:
      AssertionError: it was not refused with exit code 2 and one line.
    """
    result = subprocess.run(
        full,
        cwd=ROOT,
        env=surroundings(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START,
        check=False,
    )
    shown = result.stdout + result.stderr
    assert result.returncode == 2, shown
    lines = shown.strip().splitlines()
    assert len(lines) == 1, shown
    return lines[0]
