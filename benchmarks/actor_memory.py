"""Memory and start of an actor process, without the cost of an environment.

    python -m benchmarks.actor_memory [--quick] [--json=FILE]

The actor is a process as a program launches it; what it talks to is a policy that does nothing, in
a process of its own that was ready before.
"""

import contextlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import launchpad as lp
import psutil

from benchmarks import harness
from seedlib import environments, launching, nodes, run_directory
from seedlib.components import actor as actor_lib
from seedlib.components.transport import client

NULL_POLICY = "benchmarks.null_policy"
"""The module of the process that answers."""

AIM_MB = 120.0
"""What an actor process shall stay below, without its environment."""

COLUMNS = (
    harness.Column("actor", "actor"),
    harness.Column("mb", "RSS MB", 1, spread=True),
    harness.Column("own_mb", "unshared MB", 1, spread=True),
    harness.Column("aim_mb", "aim MB"),
    harness.Column("start_seconds", "start s", 2, spread=True),
    harness.Column("start_cpu_seconds", "start CPU s", 2, spread=True),
)

# An observation of four bytes: what is left is the actor.
_ENVIRONMENT = "synthetic:4"
_TIMEOUT = 60.0


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    runs = [_run(options.pick(2.0, 1.0, 0.3)) for _ in range(options.runs)]
    figures = {key: harness.spread(run[key] for run in runs) for key in runs[0]}
    row = {"actor": f"1 x {_ENVIRONMENT}", **figures, "aim_mb": AIM_MB}
    return [harness.Table("Actor process without environment", COLUMNS, [row])]


def _run(seconds: float) -> dict[str, float]:
    with _null_policy() as (policy, address), tempfile.TemporaryDirectory() as folder:
        directory = run_directory.RunDirectory(folder)
        actor = nodes.Actor(
            environments.load(_ENVIRONMENT),
            _fixed(address),
            [0],
            directory,
            actor_lib.ActorConfig(),
        )
        program = lp.Program("actor")
        with program.group("actor"):
            program.add_node(actor)
        launched = launching.ProcessProgram(program, directory.file("logs"))
        seen = _Watcher(launched, policy, seconds)
        launched.run(seen.tick)
        return seen.figures


def _fixed(address: str) -> nodes.Handle:
    """Returns a handle of a policy that no node of the program serves."""
    placement = nodes.Placement("null", "null", "null policy")
    return nodes.Handle(placement, None, lambda _: client.RemotePolicyService(address))


@contextlib.contextmanager
def _null_policy() -> Iterator[tuple["subprocess.Popen[str]", str]]:
    with subprocess.Popen(
        [sys.executable, "-m", NULL_POLICY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()  # Ends it.


class _Watcher:
    """Looks at the actor's process a few times a second, and ends the program."""

    def __init__(
        self, program: launching.ProcessProgram, policy: "subprocess.Popen[str]", seconds: float
    ) -> None:
        self.figures: dict[str, Any] = {}
        self._program = program
        self._policy = policy
        self._seconds = seconds
        self._first: float | None = None
        self._cpu = 0.0
        self._began = time.monotonic()

    def tick(self) -> None:
        """Called by the program."""
        process = next((psutil.Process(pid) for pid in self._program.pids.values()), None)
        if process is None or self.figures:
            return
        if time.monotonic() - self._began > _TIMEOUT:
            raise TimeoutError(f"the actor made no step within {_TIMEOUT:.0f} s")
        if self._first is None:
            self._first = self._answered()
            times = process.cpu_times()
            self._cpu = times.user + times.system
        elif time.time() - self._first > self._seconds:
            memory = process.memory_full_info()
            self.figures = {
                "mb": memory.rss / 1e6,
                "own_mb": memory.uss / 1e6,
                "start_seconds": self._first - process.create_time(),
                "start_cpu_seconds": self._cpu,
            }
            self._program.stop()

    def _answered(self) -> float | None:
        """Returns when the first step was answered, or None where it is not yet."""
        output = self._policy.stdout
        assert output is not None
        return float(output.readline()) if select.select([output], [], [], 0)[0] else None


if __name__ == "__main__":
    harness.main("actor_memory", "Measure an actor process without environment.", measure)
