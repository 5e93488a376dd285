"""A small policy service for the transport's tests, and the plumbing that they share."""

import contextlib
import dataclasses
import socket
import threading

import dm_env
import grpc
import numpy as np
from dm_env import specs as dm_specs

from seedlib.components.transport import client, options, server, service, wire

PATIENCE = 30.0
"""Seconds after which a wait counts as a hang. Nothing here takes as long, even on a busy host."""

OBSERVATION = {
    "pixels": dm_specs.Array((3, 2), np.uint8),
    "senses": (dm_specs.Array((), np.float32), [dm_specs.Array((0,), np.float64)]),
    "alive": dm_specs.Array((2,), np.bool_),
}
ACTION = {
    "move": dm_specs.DiscreteArray(5),
    "aim": (dm_specs.BoundedArray((2,), np.float32, [-1.0, -2.0], [1.0, 2.0]),),
}


def make_hello(ids=(3, 7), observation=None, action=None, actor_id="actor", token="", **changes):
    hello = service.Hello(
        actor_id=actor_id,
        environment_ids=tuple(ids),
        incarnation="first",
        evaluate=False,
        observation_spec=OBSERVATION if observation is None else observation,
        action_spec=ACTION if action is None else action,
        run_token=token,
    )
    return dataclasses.replace(hello, **changes)


def make_time_steps(rows=2, seed=0):
    rng = np.random.default_rng(seed)
    return dm_env.TimeStep(
        step_type=rng.integers(0, 3, rows).astype(np.uint8),
        reward=rng.normal(size=rows).astype(np.float32),
        discount=rng.random(rows).astype(np.float32),
        observation={
            "pixels": rng.integers(0, 256, (rows, 3, 2)).astype(np.uint8),
            "senses": (rng.normal(size=rows).astype(np.float32), [np.zeros((rows, 0))]),
            "alive": rng.random((rows, 2)) < 0.5,
        },
    )


def act(time_steps):
    """The fake policy: something of every leaf in, both leaves of the action out."""
    pixels = time_steps.observation["pixels"].astype(np.int32)
    move = pixels.sum((1, 2)) + time_steps.step_type + time_steps.observation["alive"].sum(1)
    return {
        "move": (move % 5).astype(np.int32),
        "aim": (
            np.stack([time_steps.reward, time_steps.observation["senses"][0]], 1)
            * time_steps.discount[:, None],
        ),
    }


class FakeSession:
    """Answers with `answer(time_steps)`; records that it was closed."""

    def __init__(self, hello, answer):
        self.hello = hello
        self.closed = threading.Event()
        self.closes = 0
        self._answer = answer

    def step(self, time_steps, timeout=None):
        return self._answer(self, time_steps)

    def close(self):
        self.closes += 1
        self.closed.set()


class FakeService:
    """Opens fake sessions for actors whose specs are the given ones."""

    def __init__(self, answer=None, observation=None, action=None):
        self.sessions = []
        self.opened = threading.Semaphore(0)
        self.stepping = threading.Semaphore(0)
        self._answer = answer or (lambda session, time_steps: act(time_steps))
        self._observation = observation
        self._action = action

    def open(self, hello, timeout=None):
        for name, expected, given in (
            ("observation", self._observation, hello.observation_spec),
            ("action", self._action, hello.action_spec),
        ):
            if expected is not None:
                difference = wire.spec_difference(expected, given, name)
                if difference is not None:
                    raise service.Refused(difference)
        session = FakeSession(hello, self._answer)
        self.sessions.append(session)
        self.opened.release()
        return session

    def block(self, session, time_steps):
        """An answer that never comes: ends when the session is closed, as a batcher's wait does."""
        self.stepping.release()
        if not session.closed.wait(PATIENCE):
            raise AssertionError("nobody closed a session that was blocked in a step")
        raise service.Unavailable("the session was closed")


@contextlib.contextmanager
def serving(policy_service, direct=True, client_config=None, **config):
    """Yields a started server and a client of it."""
    config.setdefault("max_streams", 8)
    with server.PolicyServer(policy_service, server.ServerConfig(**config)) as policy_server:
        settings = client_config or client.ClientConfig(
            open_timeout=PATIENCE, step_timeout=PATIENCE, direct=direct
        )
        with client.RemotePolicyService(policy_server.address, settings) as remote:
            yield policy_server, remote


class Call:
    """A call in a thread of its own, which must end."""

    def __init__(self, function, *args, **kwargs):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs))
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome = (function(*args, **kwargs), None)
        except BaseException as error:
            self._outcome = (None, error)

    def result(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call hangs"
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def raw_stream(address, messages):
    """Sends raw messages in lock-step; returns the answers and the status."""
    answers = []
    with grpc.insecure_channel(address) as channel:
        given = threading.Semaphore(1)

        def requests():
            for message in messages:
                if not given.acquire(timeout=PATIENCE):
                    return
                yield message

        call = channel.stream_stream(options.METHOD)(requests(), timeout=PATIENCE)
        try:
            for answer in call:
                answers.append(answer)
                given.release()
        except grpc.RpcError:
            given.release()
        return answers, call.code(), call.details()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
