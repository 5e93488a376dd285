"""The SEED program beside the same path in the plainest way.

    python -m benchmarks.beside_plain [--quick] [--json=FILE] [--env=NAME ...]

Both run at once, but one stands still while the other is measured, in turns, so that a machine that
becomes slower or busier meanwhile changes both. What the library adds to the plain path, and the
plain path lacks, is listed in `benchmarks.plain`.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from benchmarks import harness, live_program
from seedlib.components import configs

COLUMNS = (
    harness.Column("env", "environment"),
    harness.Column("actors", "actors"),
    harness.Column("envs", "envs/actor"),
    harness.Column("batch", "unrolls/update"),
    harness.Column("ours", "steps/s", spread=True),
    harness.Column("plain", "plain steps/s", spread=True),
    harness.Column("ratio", "steps/plain", 2, spread=True),
)
_START_TIMEOUT = 300.0


class _Task(NamedTuple):
    env: str
    envs: int
    batch: int


_TASKS = (
    _Task("gymnasium:CartPole-v1", 16, 16),
    _Task("gymnasium:CartPole-v1", 32, 32),
    _Task("gymnasium:CartPole-v1", 64, 64),
    _Task("synthetic:84x84x4", 8, 8),
    _Task("atari:Pong", 8, 8),
    _Task("atari:Pong", 16, 8),
)
_ACTORS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark alone has."""
    parser.add_argument("--env", action="append", help="an environment; repeat (default: all)")


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    names = options.arguments.env
    tasks = [task for task in _TASKS if not names or task.env in names]
    if not names:
        tasks = list(options.pick(tasks, tasks, tasks[:1]))
    rows = [_compare(task, options) for task in tasks]
    return [harness.Table("SEED beside the plain path, training, T = 20", COLUMNS, rows)]


def _compare(task: _Task, options: harness.Options) -> dict[str, Any]:
    turns, seconds = options.pick(5, 3, 1), options.pick(3.0, 3.0, 1.0)
    flags = (
        f"--env={task.env}",
        f"--num_actors={_ACTORS}",
        f"--envs_per_actor={task.envs}",
        f"--agent_option=batch_size={task.batch}",
    )
    ours, plain = [], []
    with live_program.running(*flags) as program:
        program.wait_for_update()
        program.pause()
        with _running_plain(flags) as other:
            other.wait(0.0)
            for _ in range(turns):
                other.pause()
                program.go_on()
                program.wait(1.0)  # Messages that lay about are answered by then.
                ours.append(_rate(program, seconds))
                program.pause()
                other.go_on()
                other.wait(1.0)
                start, end = other.wait(seconds)
                plain.append((end[1] - start[1]) / (end[0] - start[0]))
    return {
        **task._asdict(),
        "actors": _ACTORS,
        "ours": harness.spread(ours),
        "plain": harness.spread(plain),
        "ratio": harness.spread(a / b for a, b in zip(ours, plain, strict=True)),
    }


def _rate(program: live_program.LiveProgram, seconds: float) -> float:
    first = program.wait(0.0)
    last = program.wait(seconds)
    return last.since(first, "agent_steps") / last.since(first, "wall_seconds")


class _Plain:
    """A running `benchmarks.plain`."""

    def __init__(self, flags: Sequence[str], output: pathlib.Path) -> None:
        self._output = output
        with open(output, "wb") as file, open(output.with_suffix(".err"), "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plain", *flags],
                stdout=file,
                stderr=errors,
                env={**os.environ, "XLA_FLAGS": configs.xla_flags(), "OMP_NUM_THREADS": "1"},
            )
        self._tree = psutil.Process(self._process.pid)

    def _lines(self) -> list[tuple[float, float]]:
        text = self._output.read_text()
        return [
            (at, steps) for at, steps in map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        ]

    def wait(self, seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns the next line that counts steps, and the first that is `seconds` later."""
        seen = len(self._lines())
        late_at = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < late_at:
            lines = [line for line in self._lines()[seen:] if line[1] > 0]
            if len(lines) > 1 and lines[-1][0] - lines[0][0] >= seconds:
                return lines[0], lines[-1]
            if self._process.poll() is not None:
                errors = self._output.with_suffix(".err").read_text(errors="replace")
                raise RuntimeError(f"benchmarks.plain ended by itself:\n{errors[-5000:]}")
            time.sleep(0.05)
        raise TimeoutError(f"benchmarks.plain printed nothing for {_START_TIMEOUT:.0f} s")

    def pause(self) -> None:
        """Stands still until `go_on`."""
        live_program.pause(self._tree)

    def go_on(self) -> None:
        """Ends a `pause`."""
        live_program.go_on(self._tree)

    def stop(self) -> None:
        """Ends it."""
        for each in [self._tree, *self._tree.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()


@contextlib.contextmanager
def _running_plain(flags: Sequence[str]) -> Iterator[_Plain]:
    with tempfile.TemporaryDirectory(prefix="seedlib-benchmark-") as folder:
        plain = _Plain(flags, pathlib.Path(folder) / "output")
        try:
            yield plain
        finally:
            plain.stop()


if __name__ == "__main__":
    harness.main("beside_plain", "Measure SEED beside the plain path.", measure, add_arguments)
