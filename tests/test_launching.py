"""Tests of the supervision of a program's processes and threads, on small nodes of plain Python."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import launchpad as lp
import psutil
import pytest
from launchpad import address as lp_address

from seedlib import launching, nodes

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE = 60.0
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def until(condition, what="it"):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} took too long"
        time.sleep(0.02)
    return value


# Node functions. Each writes to a folder what a test looks at.


def note(folder, name, text=""):
    with open(folder / name, "a") as file:
        file.write(f"{text}\n")


def lines(folder, name):
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


def wait(folder, name="waiting"):
    note(folder, name, os.getpid())
    lp.wait_for_stop()
    note(folder, f"{name}-ended")


def stop_when(folder, name, count):
    """Ends the program when a file has so many lines."""
    until(lambda: len(lines(folder, name)) >= count, name)
    lp.stop()
    lp.wait_for_stop()


def fail(folder):
    note(folder, "failing", os.environ[nodes.RESTARTS_VARIABLE])
    raise RuntimeError("it cannot be done")


def fail_once(folder):
    if not lines(folder, "failing"):
        fail(folder)
    wait(folder)


def finish(folder):
    note(folder, "finished", os.environ[nodes.PROCESS_VARIABLE])


def never_end(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(folder, "stubborn", f"{os.getpid()} {child.pid}")
    time.sleep(600)


def fail_at_the_end(folder):
    wait(folder)
    raise RuntimeError("the final checkpoint cannot be written")


def make(**groups):
    """Returns a program with one group per argument: a function and its arguments, or several."""
    program = lp.Program("test")
    for label, members in groups.items():
        with program.group(label):
            for function, *arguments in members if isinstance(members, list) else [members]:
                program.add_node(lp.PyNode(function, *arguments))
    return program


def processes(folder, program, **more):
    return launching.ProcessProgram(program, folder / "logs", **more)


def test_a_node_ends_the_program_and_no_process_is_left(tmp_path):
    program = processes(
        tmp_path, make(waiter=(wait, tmp_path), ender=(stop_when, tmp_path, "waiting", 1))
    )
    assert program.run() == 0
    assert lines(tmp_path, "waiting-ended")
    assert program.pids == {}
    assert not psutil.pid_exists(int(lines(tmp_path, "waiting")[0]))


def test_a_program_ends_when_all_its_processes_have_finished(tmp_path):
    assert processes(tmp_path, make(worker=[(finish, tmp_path)] * 2)).run() == 0
    assert sorted(lines(tmp_path, "finished")) == ["worker-0", "worker-1"]


def test_a_failure_ends_the_program_and_names_process_log_and_pid(tmp_path):
    program = processes(tmp_path, make(waiter=(wait, tmp_path), broken=(fail, tmp_path)))
    with pytest.raises(launching.ProgramFailed, match="broken-0 exited with code 1") as error:
        program.run()
    log = tmp_path / "logs" / "broken-0.log"
    assert str(error.value).endswith(f"its log is {log}")
    assert "RuntimeError: it cannot be done" in log.read_text()
    assert error.value.pid is not None
    assert program.pids == {}


def test_a_killed_process_is_named_with_its_signal(tmp_path):
    program = processes(tmp_path, make(waiter=(wait, tmp_path)))

    def kill_it():
        if lines(tmp_path, "waiting") and "waiter-0" in program.pids:
            os.kill(program.pids["waiter-0"], signal.SIGKILL)

    with pytest.raises(launching.ProgramFailed, match="waiter-0 was ended by SIGKILL"):
        program.run(kill_it)


def test_a_dead_process_is_started_again_and_told_how_often(tmp_path):
    program = processes(
        tmp_path,
        make(phoenix=(fail_once, tmp_path), ender=(stop_when, tmp_path, "waiting", 1)),
        policies={"phoenix": launching.RestartPolicy(max_restarts=1, delay=0.01)},
    )
    assert program.run() == 0
    assert lines(tmp_path, "failing") == ["0"]
    assert len(lines(tmp_path, "waiting")) == 1


def test_one_failure_too_many_ends_the_program(tmp_path):
    program = processes(
        tmp_path,
        make(broken=(fail, tmp_path), waiter=(wait, tmp_path)),
        policies={"broken": launching.RestartPolicy(max_restarts=2, delay=0.01)},
    )
    with pytest.raises(launching.ProgramFailed, match="broken-0"):
        program.run()
    assert lines(tmp_path, "failing") == ["0", "1", "2"]


def test_what_is_not_fatal_is_left_out(tmp_path):
    program = processes(
        tmp_path,
        make(broken=(fail, tmp_path), ender=(stop_when, tmp_path, "failing", 2)),
        policies={"broken": launching.RestartPolicy(max_restarts=1, delay=0.01, fatal=False)},
    )
    assert program.run() == 0
    assert lines(tmp_path, "failing") == ["0", "1"]


def test_a_process_that_may_be_restarted_is_not_done_when_it_returns(tmp_path):
    # An actor that a person ends by hand, say: the program still wants it.
    program = processes(
        tmp_path,
        make(actor=(finish, tmp_path), ender=(stop_when, tmp_path, "finished", 2)),
        policies={"actor": launching.RestartPolicy(max_restarts=5, delay=0.01)},
    )
    assert program.run() == 0
    assert len(lines(tmp_path, "finished")) >= 2


def test_what_does_not_end_is_killed_with_its_children_after_its_grace(tmp_path):
    program = processes(
        tmp_path,
        make(stubborn=(never_end, tmp_path), ender=(stop_when, tmp_path, "stubborn", 1)),
        policies={"stubborn": launching.RestartPolicy(grace=0.5)},
    )
    with pytest.raises(launching.ProgramFailed, match="stubborn-0 was ended by SIGKILL"):
        program.run()
    pids = [int(pid) for pid in lines(tmp_path, "stubborn")[0].split()]
    until(lambda: not any(running(pid) for pid in pids), "the end of both")


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failure_while_the_program_ends_is_a_failure(tmp_path):
    program = processes(
        tmp_path,
        make(last=(fail_at_the_end, tmp_path), ender=(stop_when, tmp_path, "waiting", 1)),
    )
    with pytest.raises(launching.ProgramFailed, match="last-0 exited with code 1"):
        program.run()


def tell(folder, address):
    note(folder, os.environ[nodes.PROCESS_VARIABLE], address.resolve())
    note(folder, "restarts", os.environ[nodes.RESTARTS_VARIABLE])


def clients_of_servers(folder, servers, clients):
    """Returns a program in which each client tells where the last server is."""
    program = lp.Program("test")
    with program.group("server"):
        for _ in range(servers):
            server = lp.PyNode(lp.wait_for_stop)
            address = lp_address.Address("server")
            address.assign(server)
            program.add_node(server)
    with program.group("client"):
        for _ in range(clients):
            program.add_node(lp.PyNode(tell, folder, address))
    return program


def test_one_process_joins_those_of_another_launcher(tmp_path):
    first = processes(tmp_path, clients_of_servers(tmp_path, servers=2, clients=1))
    assert len(set(first.addresses["server"])) == 2
    assert first.addresses["client"] == []
    joining = launching.Joining("client", first.addresses, restarts=3)
    second = processes(tmp_path, clients_of_servers(tmp_path, 2, clients=3), joining=joining)
    assert second.addresses == first.addresses
    assert second.run() == 0
    assert lines(tmp_path, "client-2") == [first.addresses["server"][-1]]
    assert lines(tmp_path, "restarts") == ["3"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["client-2.log"]


def test_a_process_does_not_join_another_program(tmp_path):
    joining = launching.Joining("client", {"server": ["localhost:1"]})
    with pytest.raises(ValueError, match="1 addresses in its group 'server', this one 2"):
        processes(tmp_path, clients_of_servers(tmp_path, 2, 1), joining=joining)


def test_the_end_is_told_once(tmp_path):
    program = processes(
        tmp_path, make(waiter=(wait, tmp_path), ender=(stop_when, tmp_path, "waiting", 1))
    )
    told = []
    program.run(ending=lambda: told.append(len(told)))
    assert told == [0]
    assert lines(tmp_path, "waiting-ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_signal_ends_the_program_in_order_and_is_returned(tmp_path, number, way):
    sent = []

    def send():
        if lines(tmp_path, "waiting") and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    program = make(waiter=(wait, tmp_path))
    if way == "processes":
        assert processes(tmp_path, program).run(send) == number
    else:
        assert launching.run_threads(program, "local_mt", send) == number
    assert lines(tmp_path, "waiting-ended")


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_programs_in_a_row_leave_handlers_and_threads_as_before(tmp_path, way):
    handlers = [signal.getsignal(number) for number in NUMBERS]
    before = set(threading.enumerate())
    for name in ("one", "two", "three"):
        program = make(waiter=(wait, tmp_path, name), ender=(stop_when, tmp_path, name, 1))
        if way == "processes":
            processes(tmp_path, program).run()
        else:
            launching.run_threads(program, "test_mt")
        assert lines(tmp_path, f"{name}-ended")
    assert [signal.getsignal(number) for number in NUMBERS] == handlers
    until(lambda: set(threading.enumerate()) <= before, "the end of the threads")


def test_two_programs_at_the_same_time_do_not_end_each_other(tmp_path):
    # Both in threads of this process, started by threads of this process.
    launching.run_threads(make(first=(note, tmp_path, "warm")), "local_mt")
    results = []

    def run(name, end):
        program = make(waiter=(wait, tmp_path, name), ender=(stop_when, tmp_path, end, 1))
        results.append((name, launching.run_threads(program, "local_mt")))

    runners = [
        threading.Thread(target=run, args=("one", "one")),
        threading.Thread(target=run, args=("two", "later")),
    ]
    for runner in runners:
        runner.start()
    runners[0].join(PATIENCE)
    assert results == [("one", 0)]
    until(lambda: lines(tmp_path, "two"), "the second program")
    assert not lines(tmp_path, "two-ended")
    note(tmp_path, "later")
    runners[1].join(PATIENCE)
    assert results == [("one", 0), ("two", 0)]


@pytest.mark.parametrize("launch_type", ["local_mt", "test_mt"])
def test_a_failure_of_a_thread_ends_the_program_and_is_its_cause(
    tmp_path, launch_type, monkeypatch
):
    monkeypatch.setenv(nodes.RESTARTS_VARIABLE, "0")
    program = make(waiter=(wait, tmp_path), broken=(fail, tmp_path))
    with pytest.raises(launching.ProgramFailed, match="broken: RuntimeError: it cannot") as error:
        launching.run_threads(program, launch_type)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert lines(tmp_path, "waiting-ended")


def test_a_thread_that_is_not_fatal_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(nodes.RESTARTS_VARIABLE, "0")
    program = make(broken=(fail, tmp_path), ender=(stop_when, tmp_path, "failing", 1))
    policies = {"broken": launching.RestartPolicy(fatal=False)}
    assert launching.run_threads(program, "local_mt", policies=policies) == 0


def test_a_thread_that_does_not_end_is_a_failure_in_bounded_time(tmp_path):
    release = threading.Event()
    program = make(
        stuck=(lambda: note(tmp_path, "stuck") or release.wait(PATIENCE),),
        ender=(stop_when, tmp_path, "stuck", 1),
    )
    with pytest.raises(launching.ProgramFailed, match="did not end within 0 s"):
        launching.run_threads(program, "local_mt", grace=0.3)
    release.set()


def test_threads_must_pickle_where_that_is_asked_for(tmp_path):
    lock = threading.Lock()
    program = make(node=(lock.locked,))
    with pytest.raises(RuntimeError, match="serializable"):
        launching.run_threads(program, "test_mt")
    assert launching.run_threads(make(node=(lock.locked,)), "local_mt") == 0


def test_the_processes_end_when_the_launcher_is_killed(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from tests import test_launching as test\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "test.processes(folder, test.make(waiter=(test.wait, folder))).run()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        (pid,) = until(lambda: lines(tmp_path, "waiting"), "the start")
    finally:
        launcher.kill()
        launcher.wait()
    # Not killed with it: told, so that a learner can write its checkpoint.
    until(lambda: lines(tmp_path, "waiting-ended"), "the end")
    until(lambda: not running(int(pid)), "the end of the process")


@pytest.mark.parametrize(
    ("field", "value"), [("max_restarts", -1), ("window", 0.0), ("delay", 0.0), ("grace", -1.0)]
)
def test_a_policy_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must .*{value}"):
        launching.RestartPolicy(**{field: value})
