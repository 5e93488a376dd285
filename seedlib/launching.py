"""Launches a program on one machine, as processes or as threads, and looks after it to its end.

The nodes, their addresses and the workers' entry point are Launchpad's. The supervision is ours,
because its local launchers neither notice a worker that died (in a terminal) nor start it again
(anywhere), and lose failures. Here a dead actor is started again while the others go on; any other
death ends the program; the end is the same for a step limit, a signal and a failure: everybody is
told, waited for, and killed only after a bounded time.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import launchpad as lp
from absl import flags, logging
from absl.testing import flagsaver
from launchpad import address as lp_address
from launchpad import context as lp_context
from launchpad.launch import serialization, worker_manager
from launchpad.nodes.python import local_multi_processing as lp_processes

from seedlib import nodes

_POLL_SECONDS = 0.1
# Loaded here: a process between fork and exec must not import anything.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ProgramFailed(Exception):
    """A node ended as it should not have; the message names it.

    Attributes:
      what: what happened to which node.
      log: where the process's output is; None where nodes are threads.
      pid: the process whose failure ended the program; None where nodes are threads.
    """

    def __init__(self, what: str, log: pathlib.Path | None = None, pid: int | None = None) -> None:
        """Keeps all three."""
        super().__init__(what if log is None else f"{what}; its log is {log}")
        self.what = what
        self.log = log
        self.pid = pid


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a group's dead process is started again.

    A process of a group with restarts belongs to a node that runs until the program ends, so that
    it is started again also where it ended without an error.

    Attributes:
      max_restarts: restarts of one process within `window` seconds; one more failure ends the
        program.
      window: see there.
      delay: seconds before the first restart; doubles with each in the window.
      fatal: whether one failure too many ends the program, or only leaves the node out.
      grace: seconds that a process has to end once it is told to; None takes the program's.
    """

    max_restarts: int = 0
    window: float = 600.0
    delay: float = 0.5
    fatal: bool = True
    grace: float | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        for field in ("window", "delay", "grace"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field} must be positive, got {value}")


@dataclasses.dataclass(frozen=True)
class Joining:
    """How one process joins those of a program that another launcher looks after.

    Attributes:
      group: the process's; it is the last one of its group.
      addresses: where the nodes of other groups serve: the other's `ProcessProgram.addresses`.
      restarts: how often the same process was started before; see `nodes.RESTARTS_VARIABLE`.
    """

    group: str
    addresses: Mapping[str, Sequence[str]]
    restarts: int = 0


@dataclasses.dataclass
class _Worker:
    """One process of a program, over its restarts."""

    title: str
    command: list[str]
    environment: dict[str, str]
    policy: RestartPolicy
    grace: float
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
            nodes.PROCESS_VARIABLE: self.title,
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
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),  # noqa: PLW1509
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        # Its session's processes too: an environment may have started some.
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def failed(self, code: int) -> ProgramFailed:
        pid = self.process.pid if self.process is not None else None
        return ProgramFailed(f"{self.title} {_describe(code)}", self.log, pid)


def _die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when the launcher is gone, however it went."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # It was faster.
        os._exit(1)


def _ask_to_stop(launcher: int) -> None:
    """How a node ends the program. Unlike SIGTERM, the signal cannot be a person's."""
    with contextlib.suppress(ProcessLookupError):  # The launcher is gone, so all end anyway.
        os.kill(launcher, signal.SIGUSR1)


class _Flag:
    """Set once, by any thread or signal handler.

    Not a `threading.Event`: its lock is not reentrant, so that a handler which sets it waits for
    ever where it interrupts the main thread in the middle of the same.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


class ProcessProgram:
    """A program running as processes. Made and driven by the main thread of one process.

    Attributes:
      addresses: where each group's nodes serve, in their order.
    """

    def __init__(
        self,
        program: lp.Program,
        log_directory: str | os.PathLike[str],
        resources: Mapping[str, lp_processes.PythonProcess] | None = None,
        policies: Mapping[str, RestartPolicy] | None = None,
        grace: float = 30.0,
        joining: Joining | None = None,
    ) -> None:
        """Prepares every process; `run` starts them.

        Args:
          program: what to run.
          log_directory: where each process's output goes, `<group>-<number>.log`.
          resources: launch configuration by group.
          policies: restart policy by group; none means that a failure ends the program.
          grace: seconds that processes have to end once they are told to.
          joining: starts one process only, which joins those of another launcher.

        Raises:
          ValueError: the other launcher's program has other nodes.
        """
        self._stopping = _Flag()
        self._received: list[int] = []
        self._killed = False
        directory = pathlib.Path(log_directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._workers = []
        for label, title, command in _commands(program, resources or {}, grace, joining):
            policy = (policies or {}).get(label, RestartPolicy())
            self._workers.append(
                _Worker(
                    title=title,
                    command=command.command_as_list,
                    environment={key: str(value) for key, value in command.env_overrides.items()},
                    policy=policy,
                    grace=grace if policy.grace is None else policy.grace,
                    log=directory / f"{title}.log",
                    restarts=0 if joining is None else joining.restarts,
                )
            )
        self.addresses = {
            label: [address.resolve() for address in _addresses(members)]
            for label, members in program.groups.items()
        }

    def stop(self) -> None:
        """Makes `run` end the program. Any thread or signal handler may call it."""
        self._stopping.set()

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of running processes by title."""
        return {
            worker.title: worker.process.pid
            for worker in self._workers
            if worker.process is not None and worker.running
        }

    def run(
        self, tick: Callable[[], None] = lambda: None, ending: Callable[[], None] = lambda: None
    ) -> int:
        """Starts all processes and returns when all are gone.

        SIGTERM, SIGHUP and Ctrl-C end the program; a second Ctrl-C kills it at once.

        Args:
          tick: called a few times a second, for a progress line.
          ending: called once, when the processes have been told to end.

        Returns:
          The first signal that asked for the end, or 0.

        Raises:
          ProgramFailed: a process failed (and was not, or no more, started again).
        """
        failure: ProgramFailed | None = None
        with _handlers(self._handle):
            try:
                for worker in self._workers:
                    worker.start()
                while not self._stopping.is_set():
                    time.sleep(_POLL_SECONDS)
                    tick()
                    failure = self._look_after()
                    if failure is not None or all(worker.finished for worker in self._workers):
                        break
            finally:
                self._end(tick, ending)
        if failure is None and not self._killed:
            failure = self._late_failure()
        if failure is not None:
            raise failure
        return self._received[0] if self._received else 0

    def _handle(self, number: int, frame: Any) -> None:
        """Handles a signal between any two steps of the main thread, so it takes no lock."""
        del frame
        self._stopping.set()
        if number == signal.SIGUSR1:
            return
        if self._received and number == signal.SIGINT:
            self._killed = True
            for worker in self._workers:
                worker.kill()
        self._received.append(number)

    def _look_after(self) -> ProgramFailed | None:
        """Notices dead processes and starts them again where their policy says so."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.finished:
                continue
            if worker.process is None:
                if now >= worker.start_at:
                    worker.start()
                continue
            code = worker.process.poll()
            if code is None:
                continue
            policy = worker.policy
            if code == 0 and not policy.max_restarts:
                worker.finished = True
                continue
            worker.failures = [at for at in worker.failures if now - at < policy.window] + [now]
            if len(worker.failures) > policy.max_restarts:
                worker.finished = True
                failure = worker.failed(code)
                if policy.fatal:
                    return failure
                logging.error("%s; the program goes on without it", failure)
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
            # What may die at any time may die now; it has nothing to save.
            if process is None or worker.policy.max_restarts or not worker.policy.fatal:
                continue
            # Who was told to end before it could listen has ended as it should.
            if process.returncode not in (0, -signal.SIGTERM):
                return worker.failed(process.returncode)
        return None

    def _end(self, tick: Callable[[], None], ending: Callable[[], None]) -> None:
        """Tells every process to end, waits, and kills what is left."""
        self._stopping.set()
        for worker in self._workers:
            if worker.process is not None and worker.running:
                worker.process.terminate()
        told = time.monotonic()
        ending()
        while any(worker.running for worker in self._workers):
            tick()
            time.sleep(_POLL_SECONDS / 2)
            for worker in self._workers:
                if worker.running and time.monotonic() - told > worker.grace:
                    logging.error("%s did not end within %.0f s", worker.title, worker.grace)
                    worker.kill()


def _describe(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"


@contextlib.contextmanager
def _handlers(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles the signals that end a program; outside the main thread there are none to handle."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(
    program: lp.Program,
    launch_type: lp_context.LaunchType,
    stopper: Callable[[], None],
    resources: Mapping[str, lp_processes.PythonProcess],
) -> None:
    """Tells the nodes how they are launched, and their addresses; in the order Launchpad does."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv, known_only=True)
    for label, members in program.groups.items():
        for node in members:
            node.launch_context.initialize(launch_type, resources.get(label), stopper)
    for label, members in program.groups.items():
        for node in members:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in program.get_all_nodes():
        node.bind_addresses()


@dataclasses.dataclass(frozen=True)
class _Elsewhere(lp_address.AbstractAddressBuilder):
    """The address of a node that another launcher has started."""

    address: str

    def build(self) -> str:
        return self.address


def _addresses(members: Sequence[Any]) -> list[lp_address.Address]:
    return [address for node in members for address in node.addresses]


def _bind_elsewhere(program: lp.Program, joining: Joining) -> None:
    """Gives the nodes of other groups the addresses that they have.

    Raises:
      ValueError: there are not as many, so it is another program.
    """
    for label, members in program.groups.items():
        addresses = _addresses(members)
        if label == joining.group:
            continue
        known = joining.addresses.get(label, ())
        if len(known) != len(addresses):
            raise ValueError(
                f"the program to join has {len(known)} addresses in its group {label!r}, this one "
                f"{len(addresses)}"
            )
        for address, text in zip(addresses, known, strict=True):
            address.bind(_Elsewhere(text))


@dataclasses.dataclass(frozen=True)
class _Function:
    """What Launchpad looks at of a node when it writes a process's command."""

    function: Callable[[], Any]


def _disarm(function: Callable[[], Any]) -> Any:
    """Runs a node's function in its process, and then takes back the alarm of Launchpad.

    That is set anew each second while the process is to end, and would cut a slow exit of Python
    short, exit code and all.
    """
    try:
        return function()
    finally:
        signal.alarm(0)


def _commands(
    program: lp.Program,
    resources: Mapping[str, lp_processes.PythonProcess],
    grace: float,
    joining: Joining | None,
) -> list[tuple[str, str, Any]]:
    """Returns `(group, title, command)` of each process, as Launchpad's own launcher makes them.

    Where one joins another launcher's, that one's alone.
    """
    plain = {label: lp_processes.PythonProcess() for label in program.groups}
    _prepare(
        program,
        lp_context.LaunchType.LOCAL_MULTI_PROCESSING,
        functools.partial(_ask_to_stop, os.getpid()),
        {**plain, **resources},
    )
    if joining is not None:
        _bind_elsewhere(program, joining)
    commands = []
    for label, members in program.groups.items():
        functions = [_Function(functools.partial(_disarm, node.function)) for node in members]
        for command in members[0].to_executables(functions, label, members[0].launch_context):
            # The worker would kill itself after 10 s; how long it may take is decided here. With
            # the launcher gone, its own limit is what counts.
            command.command_as_list.append(f"--lp_termination_notice_secs={int(grace) + 1}")
            commands.append((label, command.title.replace("/", "-"), command))
    if joining is not None:
        return [command for command in commands if command[0] == joining.group][-1:]
    return commands


def run_threads(
    program: lp.Program,
    launch_type: str,
    tick: Callable[[], None] = lambda: None,
    policies: Mapping[str, RestartPolicy] | None = None,
    grace: float = 30.0,
) -> int:
    """Runs a program as threads of this process, and returns when all have ended.

    Threads are not started again. Signals are handled as by `ProcessProgram.run` where this is the
    main thread.

    Args:
      program: what to run.
      launch_type: "local_mt", or "test_mt", which also checks that every node pickles.
      tick: called a few times a second.
      policies: by group; only `fatal` counts here.
      grace: seconds that nodes have to end once they are told to.

    Returns:
      The first signal that asked for the end, or 0.

    Raises:
      ProgramFailed: a node failed, or did not end in time; caused by the first failure.
    """
    kind = lp_context.LaunchType(launch_type)
    if kind is lp_context.LaunchType.TEST_MULTI_THREADING:
        for label, members in program.groups.items():
            serialization.check_nodes_are_serializable(label, members)
    stopping = _Flag()
    received: list[int] = []
    failures: list[tuple[str, BaseException]] = []

    def handle(number: int, frame: Any) -> None:
        del frame
        stopping.set()
        if number != signal.SIGUSR1:
            if received and number == signal.SIGINT:
                os._exit(128 + number)  # Threads cannot be killed.
            received.append(number)

    def guard(label: str, function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                if not (policies or {}).get(label, RestartPolicy()).fatal:
                    logging.exception("%s failed; the program goes on without it", label)
                    return
                failures.append((label, error))
                stopping.set()

        return run

    _prepare(program, kind, stopping.set, {})
    with _launchpad_signals():
        # It gives nodes their stop event. Its own ways with signals and failures are not used.
        with flagsaver.flagsaver(lp_termination_notice_secs=-1):
            manager = worker_manager.WorkerManager(kill_main_thread=False, register_signals=False)
        with _handlers(handle):
            for label, members in program.groups.items():
                context = members[0].launch_context
                for function in members[0].to_executables(members, label, context):
                    manager.thread_worker(label, guard(label, function))
            waiter = threading.Thread(
                target=manager.wait, kwargs={"raise_error": False}, name="waiter", daemon=True
            )
            waiter.start()
            while waiter.is_alive() and not stopping.is_set():
                time.sleep(_POLL_SECONDS)
                tick()
            # Sets the nodes' stop event and calls whom they registered.
            ender = threading.Thread(target=manager.stop_and_wait, name="ender", daemon=True)
            ender.start()
            deadline = time.monotonic() + grace
            while ender.is_alive() and time.monotonic() < deadline:
                tick()
                ender.join(_POLL_SECONDS)
            stuck = ender.is_alive()
            if not stuck:
                waiter.join()
    if failures:
        label, error = failures[0]
        raise ProgramFailed(f"{label}: {type(error).__name__}: {error}") from error
    if stuck:
        raise ProgramFailed(f"a node did not end within {grace:.0f} s; its thread still runs")
    return received[0] if received else 0


@contextlib.contextmanager
def _launchpad_signals() -> Iterator[None]:
    """Puts back the signal handlers that Launchpad's worker manager replaces for good."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
