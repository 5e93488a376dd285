"""Launches a program as processes of one machine, and looks after them.

The nodes, their addresses and the workers' entry point are Launchpad's. The supervision is ours,
because its local launcher neither notices a worker that died (in a terminal) nor starts it again
(anywhere), and does not end with the first failure. Here a dead actor is started again while the
others go on; any other death ends the program; the end is the same for a step limit, a signal and a
failure: every process is told, waited for, and killed only after a bounded time.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import launchpad as lp
from absl import logging
from absl.testing import absltest
from launchpad import context as lp_context
from launchpad.nodes.python import local_multi_processing as lp_processes

from seedlib import nodes

_POLL_SECONDS = 0.1


class ProgramFailed(Exception):
    """A process ended as it should not have; the message names it."""


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a group's dead process is started again.

    Attributes:
      max_restarts: restarts of one process within `window` seconds; one more failure ends the
        program.
      window: see there.
      delay: seconds before the first restart; doubles with each in the window.
      fatal: whether one failure too many ends the program, or only leaves the process out.
    """

    max_restarts: int = 0
    window: float = 600.0
    delay: float = 0.5
    fatal: bool = True

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        if self.window <= 0 or self.delay < 0:
            raise ValueError(f"window and delay must be positive, got {self.window}, {self.delay}")


@dataclasses.dataclass
class _Worker:
    """One process of a program, over its restarts."""

    title: str
    command: list[str]
    environment: dict[str, str]
    policy: RestartPolicy
    log: pathlib.Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    failures: list[float] = dataclasses.field(default_factory=list)
    start_at: float = 0.0
    finished: bool = False

    def start(self) -> None:
        environment = {
            **os.environ,
            **self.environment,
            nodes.RESTARTS_VARIABLE: str(self.restarts),
        }
        with open(self.log, "ab") as log:
            # A session of its own: Ctrl-C reaches the launcher alone, which ends all in order.
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  The launcher has no threads.
            )


def _die_with_parent() -> None:
    """Asks the kernel to end this process when the launcher is gone, however it went."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


class ProcessProgram:
    """A program running as processes. Made and driven by the main thread of one process."""

    def __init__(
        self,
        program: lp.Program,
        log_directory: str | os.PathLike[str],
        resources: Mapping[str, lp_processes.PythonProcess] | None = None,
        policies: Mapping[str, RestartPolicy] | None = None,
        grace: float = 20.0,
    ) -> None:
        """Prepares every process; `run` starts them.

        Args:
          program: what to run.
          log_directory: where each process's output goes, `<group>-<number>.log`.
          resources: launch configuration by group.
          policies: restart policy by group; none means that a failure ends the program.
          grace: seconds that processes have to end once they are told to.
        """
        self._grace = grace
        self._stopping = threading.Event()
        self._signals = 0
        directory = pathlib.Path(log_directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._workers = []
        for label, node, command in _commands(program, resources or {}, grace):
            del node
            title = command.title.replace("/", "-")
            self._workers.append(
                _Worker(
                    title=title,
                    command=command.command_as_list,
                    environment={key: str(value) for key, value in command.env_overrides.items()},
                    policy=(policies or {}).get(label, RestartPolicy()),
                    log=directory / f"{title}.log",
                )
            )

    def stop(self) -> None:
        """Makes `run` end the program. Any thread or signal handler may call it."""
        self._stopping.set()

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of running processes by title."""
        return {
            worker.title: worker.process.pid
            for worker in self._workers
            if worker.process is not None and worker.process.poll() is None
        }

    def run(self, tick: Callable[[], None] = lambda: None) -> int:
        """Starts all processes and returns when all are gone.

        SIGTERM, SIGHUP and Ctrl-C end the program; a second one kills it at once.

        Args:
          tick: called a few times a second, for a progress line.

        Returns:
          The signal that ended it, or 0.

        Raises:
          ProgramFailed: a process failed (and was not, or no more, started again).
        """
        received = []

        def handle(number: int, frame: Any) -> None:
            del frame
            # Nodes end a program by SIGTERM to the launcher, so only others count as a person's.
            received.append(number)
            if len(received) > 1 and number != signal.SIGTERM:
                self._kill()
            self._stopping.set()

        before = {
            number: signal.signal(number, handle)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        failure: ProgramFailed | None = None
        try:
            for worker in self._workers:
                worker.start()
            while not self._stopping.wait(_POLL_SECONDS):
                tick()
                failure = self._look_after()
                if failure is not None or all(worker.finished for worker in self._workers):
                    break
        finally:
            self._end(tick)
            for number, handler in before.items():
                signal.signal(number, handler)
        if failure is None:
            failure = self._late_failure()
        if failure is not None:
            raise failure
        return received[0] if received else 0

    def _look_after(self) -> ProgramFailed | None:
        """Notices dead processes and starts them again where their policy says so."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None:
                if now >= worker.start_at:
                    worker.start()
                continue
            code = worker.process.poll()
            if code is None or worker.finished:
                continue
            if code == 0:
                worker.finished = True
                continue
            policy = worker.policy
            worker.failures = [at for at in worker.failures if now - at < policy.window] + [now]
            if len(worker.failures) > policy.max_restarts:
                worker.finished = True
                text = f"{worker.title} {_describe(code)}; its log is {worker.log}"
                if policy.fatal:
                    return ProgramFailed(text)
                logging.error("%s; the program goes on without it", text)
                continue
            delay = policy.delay * 2 ** (len(worker.failures) - 1)
            logging.warning("%s %s; restart in %.1f s", worker.title, _describe(code), delay)
            worker.restarts += 1
            worker.start_at = now + delay
            worker.process = None
        return None

    def _late_failure(self) -> ProgramFailed | None:
        """A process that failed while the program was ending: the end was its doing."""
        for worker in self._workers:
            process = worker.process
            if process is None or worker.policy.max_restarts:
                continue
            # Killed ones did not obey in time; that is a failure too.
            if process.returncode not in (0, None):
                return ProgramFailed(
                    f"{worker.title} {_describe(process.returncode)}; its log is {worker.log}"
                )
        return None

    def _end(self, tick: Callable[[], None]) -> None:
        """Tells every process to end, waits, and kills what is left."""
        self._stopping.set()
        running = [worker.process for worker in self._workers if worker.process is not None]
        for process in running:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + self._grace
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            tick()
            time.sleep(_POLL_SECONDS / 2)
        self._kill()
        for process in running:
            process.wait()

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.poll() is None:
                logging.error("%s did not end in time; killing it", worker.title)
                # Its session's processes too: an environment may have started some.
                os.killpg(worker.process.pid, signal.SIGKILL)


def _describe(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _commands(
    program: lp.Program, resources: Mapping[str, lp_processes.PythonProcess], grace: float
) -> list[tuple[str, Any, Any]]:
    """Returns `(group, node, command)` of each process, as Launchpad's own launcher makes them."""
    groups = program.groups
    for label, members in groups.items():
        for node in members:
            node._initialize_context(
                lp_context.LaunchType.LOCAL_MULTI_PROCESSING,
                launch_config=resources.get(label, lp_processes.PythonProcess()),
            )
    for label, members in groups.items():
        for node in members:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in program.get_all_nodes():
        node.bind_addresses()
    commands = []
    for label, members in groups.items():
        executables = members[0].to_executables(members, label, members[0].launch_context)
        for node, command in zip(members, executables, strict=True):
            # The worker would kill itself after 10 s; how long it may take is decided here.
            command.command_as_list.append(f"--lp_termination_notice_secs={int(grace) + 10}")
            commands.append((label, node, command))
    return commands


def run_threads(
    program: lp.Program, launch_type: str, tick: Callable[[], None] = lambda: None
) -> int:
    """Runs a program as threads of this process, by Launchpad's own launcher.

    Args:
      program: what to run.
      launch_type: "local_mt" or "test_mt".
      tick: called a few times a second.

    Returns:
      0: a signal ends it like a node does.

    Raises:
      ProgramFailed: a node failed.
    """
    test_case = absltest.TestCase() if launch_type == "test_mt" else None
    manager = lp.launch(program, launch_type=launch_type, test_case=test_case)
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_POLL_SECONDS):
            tick()

    ticker = threading.Thread(target=show, name="progress")
    ticker.start()
    try:
        manager.wait()
    except Exception as error:
        raise ProgramFailed(f"{type(error).__name__}: {error}") from error
    finally:
        ended.set()
        ticker.join()
        if test_case is not None:
            test_case.doCleanups()
    return 0
