"""Who stops, dies, freezes or comes late: every call ends in a typed error, and none hangs."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import grpc
import pytest

import seedlib
from seedlib.components.transport import client, options, server, service
from tests.components.transport import fakes

_SERVER = """
import sys
from seedlib.components.transport import server
from tests.components.transport import fakes
policy_service = fakes.FakeService()
policy_service._answer = policy_service.block
with server.PolicyServer(policy_service) as policy_server:
    print(policy_server.address, flush=True)
    sys.stdin.read()
"""

_CLIENT = """
import sys
from seedlib.components.transport import client, service
from tests.components.transport import fakes
config = client.ClientConfig(keepalive_time=0.5, keepalive_timeout=0.5)
session = client.RemotePolicyService(sys.argv[1], config).open(fakes.make_hello())
print("open", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
try:
    session.step(fakes.make_time_steps())
except service.PolicyServiceError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.fixture(params=[True, False], ids=["direct", "queue"])
def direct(request):
    return request.param


def _blocking_service():
    policy_service = fakes.FakeService()
    policy_service._answer = policy_service.block
    return policy_service


class _Process:
    """Python code in a process of its own; yields it and its first line."""

    def __init__(self, code, *arguments):
        root = str(pathlib.Path(seedlib.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
            text=True,
        )

    def __enter__(self):
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return self._process, line.strip()

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.communicate(timeout=fakes.PATIENCE)


def test_call_after_shutdown(direct):
    with fakes.serving(fakes.FakeService(), direct) as (policy_server, remote):
        session = remote.open(fakes.make_hello())
        session.step(fakes.make_time_steps())
        policy_server.stop(grace=0.1)
        with pytest.raises(service.Unavailable):
            fakes.Call(session.step, fakes.make_time_steps()).result()
        with pytest.raises(service.Unavailable, match=r"did not answer within 0\.5 s"):
            fakes.Call(remote.open, fakes.make_hello(), 0.5).result()


def test_shutdown_during_calls(direct):
    with fakes.serving(fakes.FakeService(), direct) as (policy_server, remote):
        stepped = threading.Event()

        def run():
            session = remote.open(fakes.make_hello())
            while True:
                session.step(fakes.make_time_steps())
                stepped.set()

        call = fakes.Call(run)
        assert stepped.wait(fakes.PATIENCE)
        policy_server.stop(grace=0.1)
        with pytest.raises(service.Unavailable):
            call.result()


def test_shutdown_during_a_blocked_call(direct):
    policy_service = _blocking_service()
    with fakes.serving(policy_service, direct) as (policy_server, remote):
        session = remote.open(fakes.make_hello())
        call = fakes.Call(session.step, fakes.make_time_steps())
        assert policy_service.stepping.acquire(timeout=fakes.PATIENCE)
        fakes.Call(policy_server.stop, 0.1).result()
        with pytest.raises(service.Unavailable):
            call.result()
        assert policy_service.sessions[0].closes == 1


def test_shutdown_while_some_wait_for_a_batch_that_never_fills():
    # The batch is full with four sessions, and only three ever step.
    batch = threading.Condition()
    waiting = []

    def answer(session, time_steps):
        with batch:
            waiting.append(session)
            batch.notify_all()
            batch.wait_for(lambda: len(waiting) >= 4 or session.closed.is_set(), fakes.PATIENCE)
        raise service.Unavailable("the batcher is closed")

    class Session(fakes.FakeSession):
        def close(self):
            super().close()
            with batch:
                batch.notify_all()

    class Service(fakes.FakeService):
        def open(self, hello, timeout=None):
            return Session(hello, answer)

    with fakes.serving(Service()) as (policy_server, remote):
        sessions = [remote.open(fakes.make_hello((index,))) for index in range(3)]
        calls = [fakes.Call(session.step, fakes.make_time_steps(1)) for session in sessions]
        with batch:
            assert batch.wait_for(lambda: len(waiting) == 3, fakes.PATIENCE)
        fakes.Call(policy_server.stop, 0.1).result()
        for call in calls:
            with pytest.raises(service.Unavailable):
                call.result()


def test_client_before_server(direct):
    address = f"127.0.0.1:{fakes.free_port()}"
    config = client.ClientConfig(direct=direct)
    with client.RemotePolicyService(address, config) as remote:
        with pytest.raises(service.Unavailable, match=r"did not answer within 0\.2 s"):
            remote.open(fakes.make_hello(), timeout=0.2)
        call = fakes.Call(remote.open, fakes.make_hello(), timeout=fakes.PATIENCE)
        with server.PolicyServer(fakes.FakeService(), server.ServerConfig(address)):
            call.result().step(fakes.make_time_steps())


def test_restart_on_the_same_address(direct):
    address = f"127.0.0.1:{fakes.free_port()}"
    config = client.ClientConfig(open_timeout=fakes.PATIENCE, direct=direct)
    with client.RemotePolicyService(address, config) as remote:
        for _ in range(5):
            with server.PolicyServer(
                fakes.FakeService(), server.ServerConfig(address)
            ) as policy_server:
                session = _reopen(remote)
                session.step(fakes.make_time_steps())
                policy_server.stop(grace=0.0)
                with pytest.raises(service.Unavailable):
                    fakes.Call(session.step, fakes.make_time_steps()).result()


def test_a_step_without_an_answer_ends_at_its_timeout(direct):
    policy_service = _blocking_service()
    with fakes.serving(policy_service, direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        call = fakes.Call(session.step, fakes.make_time_steps(), timeout=0.2)
        with pytest.raises(service.Unavailable, match=r"did not answer within 0\.2 s"):
            call.result()
        # And the server, whose step was blocked, has learnt of it.
        assert policy_service.sessions[0].closed.wait(fakes.PATIENCE)


def test_closing_from_another_thread_wakes_a_blocked_step(direct):
    policy_service = _blocking_service()
    with fakes.serving(policy_service, direct) as (_, remote):
        for close in ("session", "service"):
            session = remote.open(fakes.make_hello())
            call = fakes.Call(session.step, fakes.make_time_steps())
            assert policy_service.stepping.acquire(timeout=fakes.PATIENCE)
            fakes.Call(session.close if close == "session" else remote.close).result()
            with pytest.raises(service.Unavailable):
                call.result()
            assert policy_service.sessions[-1].closed.wait(fakes.PATIENCE)
        with pytest.raises(service.Unavailable, match="this client is closed"):
            remote.open(fakes.make_hello())


@pytest.mark.parametrize("then", ["wait", "step"])
def test_a_killed_client_is_closed_on_the_server(then):
    policy_service = _blocking_service()
    with fakes.serving(policy_service) as (policy_server, _):
        with _Process(_CLIENT, policy_server.address, then) as (process, _):
            if then == "step":
                assert policy_service.stepping.acquire(timeout=fakes.PATIENCE)
            assert not policy_service.sessions[0].closed.is_set()
            process.send_signal(signal.SIGKILL)
            assert policy_service.sessions[0].closed.wait(fakes.PATIENCE)
        assert policy_service.sessions[0].closes == 1


@pytest.mark.parametrize("then", ["wait", "step"])
def test_a_frozen_client_is_noticed_by_keepalive(then):
    policy_service = _blocking_service()
    with (
        fakes.serving(policy_service, keepalive_time=0.5, keepalive_timeout=0.5) as (
            policy_server,
            remote,
        ),
        _Process(_CLIENT, policy_server.address, then) as (process, _),
    ):
        if then == "step":
            assert policy_service.stepping.acquire(timeout=fakes.PATIENCE)
        process.send_signal(signal.SIGSTOP)
        assert policy_service.sessions[0].closed.wait(fakes.PATIENCE)
        # Meanwhile the rest of the world goes on.
        policy_service._answer = lambda session, steps: fakes.act(steps)
        remote.open(fakes.make_hello((8, 9))).step(fakes.make_time_steps())


def test_an_idle_stream_outlives_many_keepalives():
    # This client asks for a sign of life once a second (gRPC makes 50 ms into that). gRPC's own
    # servers allow one in 5 minutes and cut the client off after three more, in the fifth second.
    config = client.ClientConfig(keepalive_time=0.05, keepalive_timeout=fakes.PATIENCE)
    with fakes.serving(fakes.FakeService(), client_config=config) as (_, remote):
        session = remote.open(fakes.make_hello())
        session.step(fakes.make_time_steps())
        assert not threading.Event().wait(6.0)  # A slow environment: the idle time is the subject.
        session.step(fakes.make_time_steps())


def test_a_client_that_says_nothing_is_cut_off():
    said_nothing = threading.Event()
    with fakes.serving(fakes.FakeService(), handshake_timeout=0.2) as (policy_server, _):

        def silence():
            said_nothing.wait(fakes.PATIENCE)
            yield b""

        with grpc.insecure_channel(policy_server.address) as channel:
            call = channel.stream_stream(options.METHOD)(silence(), timeout=fakes.PATIENCE)
            assert call.code() is grpc.StatusCode.CANCELLED
            said_nothing.set()


def test_a_server_stops_twice_and_starts_once():
    policy_server = server.PolicyServer(fakes.FakeService())
    policy_server.start()
    with pytest.raises(RuntimeError, match="only once"):
        policy_server.start()
    policy_server.stop()
    policy_server.stop()
    with pytest.raises(RuntimeError, match="only once"):
        policy_server.start()


def _reopen(remote):
    """Opens a session as an actor does: again where the old server's end comes in between."""
    for _ in range(100):
        try:
            return remote.open(fakes.make_hello())
        except service.Unavailable:
            continue
    raise AssertionError("the server did not come back")
