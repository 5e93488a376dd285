"""Tests of nodes and handles: what a handle stands for, where, and what a node does that fails."""

import os
import pathlib
import subprocess
import sys
import threading

import cloudpickle
import launchpad as lp
import pytest
from launchpad.launch.test_multi_threading import address_builder

from programs import experiment as experiment_lib
from programs import seed
from seedlib import environments, launching, nodes, run_directory, specs
from seedlib.agents import loading
from seedlib.components import configs

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAVY = {"jax", "jaxlib", "tensorflow", "reverb", "haiku", "rlax"}


class Counter:
    """A component: something that only its own process can count with."""

    def __init__(self):
        self.count = 0


class CounterWorker:
    """Serves a counter until the program ends."""

    def __init__(self, address=None, placement=None):
        self.component = Counter()
        self.address = address

    def run(self, stop):
        lp.wait_for_stop()


class CountingWorker:
    """Says what it got as its counter, and ends the program."""

    component = None

    def __init__(self, counter, directory):
        self._counter = counter
        self._directory = directory

    def run(self, stop):
        kind = type(self._counter).__name__
        same = self._counter in list(nodes._INSTANCES._instances.values())
        (self._directory / "found.txt").write_text(f"{kind} {same}")
        lp.stop()


class Client:
    """What a process gets that does not serve the counter."""

    closed = 0

    def __init__(self, address):
        self.address = address

    def close(self):
        Client.closed += 1


class FailingWorker:
    """A worker whose run raises."""

    component = None

    def run(self, stop):
        raise RuntimeError("it cannot be done")


def counting(directory, remote=Client):
    counter = nodes.Node("counter", CounterWorker, remote=remote)
    user = nodes.Node("user", CountingWorker, counter, directory)
    return counter, user


def apart(directory, remote=Client):
    counter, user = counting(directory, remote)
    program = lp.Program("apart")
    with program.group("counter"):
        program.add_node(counter)
    with program.group("user"):
        program.add_node(user)
    return program


def together(directory):
    program = lp.Program("together")
    with program.group("both"):
        program.add_node(nodes.colocate(*counting(directory)))
    return program


def run_processes(program, directory):
    launching.ProcessProgram(program, directory / "logs", grace=20.0).run()


def run_threads(program, directory):
    launching.run_threads(program, "test_mt")


# In `local_mt` every node shares one process; that must not change what a handle stands for.
WAYS = pytest.mark.parametrize("run", [run_processes, run_threads])


@WAYS
def test_a_handle_is_the_object_itself_among_colocated_nodes(tmp_path, run):
    run(together(tmp_path), tmp_path)
    assert (tmp_path / "found.txt").read_text() == "Counter True"


@WAYS
def test_a_handle_is_a_client_among_nodes_that_are_apart(tmp_path, run):
    run(apart(tmp_path), tmp_path)
    assert (tmp_path / "found.txt").read_text() == "Client False"


def test_a_handle_made_before_colocating_follows_its_node(tmp_path):
    counter = nodes.Node("counter", CounterWorker, remote=Client)
    handle = counter.create_handle()
    nodes.colocate(counter)
    assert handle.placement is counter.placement
    assert handle.placement.process != handle.placement.node


def test_a_client_gets_the_address_of_its_node():
    counter = nodes.Node("counter", CounterWorker, remote=Client)
    address_builder.bind_addresses([counter])
    client = counter.create_handle().dereference()
    assert isinstance(client, Client)
    assert client.address == counter.address.resolve()


def test_a_node_that_serves_its_own_process_only_says_so():
    lonely = nodes.Node("learner", CounterWorker)
    with pytest.raises(TypeError, match="learner serves its own process only; colocate") as error:
        lonely.create_handle().dereference()
    assert len(str(error.value).splitlines()) == 1


def test_a_node_closes_the_clients_that_it_used(tmp_path):
    before = Client.closed
    run_threads(apart(tmp_path), tmp_path)
    assert Client.closed == before + 1


def test_no_instance_is_left_behind_by_a_program(tmp_path):
    before = dict(nodes._INSTANCES._instances)
    run_threads(together(tmp_path), tmp_path)
    assert nodes._INSTANCES._instances == before


@pytest.mark.parametrize("colocated", [False, True])
def test_a_failure_is_recorded_in_the_run_directory_with_its_node(tmp_path, colocated):
    directory = run_directory.RunDirectory(tmp_path / "run")
    failing = nodes.Node("number seven", FailingWorker, directory=directory)
    program = lp.Program("failing")
    with program.group("group"):
        program.add_node(nodes.colocate(failing) if colocated else failing)
    with pytest.raises(launching.ProgramFailed, match="it cannot be done") as error:
        launching.run_threads(program, "local_mt")
    assert isinstance(error.value.__cause__, RuntimeError)
    ((node, trace),) = directory.failures()
    assert node == "number seven"
    assert trace.splitlines()[-1] == "RuntimeError: it cannot be done"
    assert "in run" in trace
    assert directory.first_failure(os.getpid()) == (node, trace)
    assert directory.first_failure(os.getpid() + 1) is None


def test_nobody_waits_for_a_partner_that_cannot_start(tmp_path):
    class Unmade:
        def __init__(self, address, placement):
            raise OSError("no such table")

    missing = nodes.Node("queue", Unmade, remote=Client)
    waiting = nodes.Node("user", CountingWorker, missing, tmp_path)
    program = lp.Program("missing")
    with program.group("both"):
        program.add_node(nodes.colocate(missing, waiting))
    with pytest.raises(launching.ProgramFailed, match="no such table"):
        launching.run_threads(program, "local_mt")
    assert not (tmp_path / "found.txt").exists()


def test_colocated_nodes_end_before_a_failure_of_one_is_raised(tmp_path):
    ended = threading.Event()

    class Careful:
        component = None

        def run(self, stop):
            lp.wait_for_stop()
            ended.set()

    careful = nodes.Node("careful", Careful)
    failing = nodes.Node("failing", FailingWorker)
    program = lp.Program("careful")
    with program.group("both"):
        program.add_node(nodes.colocate(careful, failing))
    with pytest.raises(launching.ProgramFailed, match="it cannot be done"):
        launching.run_threads(program, "local_mt")
    assert ended.is_set()


def test_a_failure_after_the_stop_is_not_lost():
    class Stubborn:
        component = None

        def run(self, stop):
            lp.stop()
            lp.wait_for_stop()
            raise RuntimeError("the final checkpoint cannot be written")

    program = lp.Program("stubborn")
    with program.group("group"):
        program.add_node(nodes.colocate(nodes.Node("stubborn", Stubborn)))
    with pytest.raises(launching.ProgramFailed, match="the final checkpoint"):
        launching.run_threads(program, "local_mt")


@pytest.fixture
def program(tmp_path):
    environment = environments.load("catch")
    sample = environment(seed=0)
    experiment = experiment_lib.Experiment(
        program="seed",
        environment=environment,
        agent=loading.AgentFactory("vtrace", specs.make_environment_spec(sample)),
        directory=run_directory.RunDirectory(tmp_path / "run"),
        num_actors=2,
        envs_per_actor=2,
        num_steps=10,
        num_evaluators=1,
    )
    return seed.seed(experiment)


def test_the_nodes_of_a_program_are_small(program):
    for label, members in program.groups.items():
        for node in members:
            assert len(cloudpickle.dumps(node.function)) < 20_000, label


def test_unpickling_an_actor_brings_nothing_heavy(program, tmp_path):
    path = tmp_path / "actor.pickle"
    path.write_bytes(cloudpickle.dumps([node.function for node in program.groups["actor"]]))
    code = (
        "import pickle, sys\n"
        f"pickle.load(open({str(path)!r}, 'rb'))\n"
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not set(result.stdout.split()) & HEAVY


def test_the_groups_of_a_program_are_its_processes(program):
    assert {label: len(members) for label, members in program.groups.items()} == {
        "learner": 1,
        "actor": 2,
        "evaluator": 1,
    }


def test_a_queue_is_not_taken_for_a_replay():
    spec = specs.make_environment_spec(environments.load("catch")(seed=0))
    agent = loading.AgentFactory("seedlib.agents.r2d2:make_agent", spec)
    with pytest.raises(ValueError, match=r"r2d2:make_agent learns from a replay, and this is a q"):
        nodes._queue_layout(agent, configs.TrajectoryQueueConfig())
