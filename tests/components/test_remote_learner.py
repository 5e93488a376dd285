"""A learner and inference in different processes, over real gRPC on loopback."""

import socket
import threading

import jax
import numpy as np
import pytest

from seedlib import environments, specs
from seedlib.agents import loading
from seedlib.components import episodes, inference, monitor, parameters, remote_learner
from seedlib.components.transport import (
    learner_client,
    learner_server,
    learner_service,
    listener,
    service,
)

DEVICE = jax.local_devices()[0]
QUICK = learner_client.LearnerClientConfig(period=0.01, connect_timeout=20.0, run_token="secret")


def make_agent(**options):
    spec = specs.make_environment_spec(environments.load("catch")(0))
    return loading.AgentFactory("vtrace", spec, options)()


class StubTrainer:
    """The part of a `Trainer` that a front uses, with a real store and a real monitor."""

    def __init__(self, agent, num_steps=None):
        self.store = parameters.ParameterStore([DEVICE])
        self.monitor = monitor.RunMonitor(num_steps)
        self.agent = agent
        self.watched = []
        self.get = self.store.get
        self.observe = self.monitor.observe
        self.watch = self.watched.append
        self.params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
        self.publish(0)

    def publish(self, version):
        """Publishes parameters whose every number is `version`."""
        self.store.publish(
            version,
            jax.tree_util.tree_map(lambda x: np.full(x.shape, version, x.dtype), self.params),
        )


@pytest.fixture
def trainer():
    return StubTrainer(make_agent())


def serve(trainer, address="localhost:0", token="secret"):
    config = listener.ServerConfig(address=address, run_token=token)
    server = learner_server.LearnerServer(remote_learner.LearnerFront(trainer, DEVICE), config)
    server.start()
    return server


def wait_for(condition):
    """Polls a condition that another thread brings about; fails after 30 s."""
    done = threading.Event()
    for _ in range(3000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen within 30 s")


def ended(returns, evaluate=False):
    count = len(returns)
    return episodes.Episodes(
        np.arange(count, dtype=np.int32),
        np.asarray(returns, np.float64),
        np.full(count, 7, np.int64),
        np.full(count, evaluate),
    )


def test_parameters_arrive_whole_and_newer_ones_follow(trainer):
    server = serve(trainer)
    remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
    try:
        version, params = remote.get(DEVICE, timeout=30)
        assert version == 0
        jax.tree_util.tree_map(np.testing.assert_array_equal, params, trainer.get(DEVICE).params)
        trainer.publish(2**53 + 1)
        wait_for(lambda: remote.get(DEVICE).version == 2**53 + 1)
        for leaf in jax.tree_util.tree_leaves(remote.get(DEVICE).params):
            assert (np.asarray(leaf) == np.float32(2**53 + 1)).all()
    finally:
        remote.close()
        server.stop()


def test_a_version_is_copied_to_the_device_once(trainer):
    server = serve(trainer)
    remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
    try:
        first = remote.get(DEVICE, timeout=30)
        assert remote.get(DEVICE) is first
    finally:
        remote.close()
        server.stop()


def test_steps_episodes_and_statistics_arrive_exactly_once(trainer):
    server = serve(trainer)
    remotes = [remote_learner.RemoteLearner(server.address, trainer.agent, QUICK) for _ in range(3)]
    try:
        for remote in remotes:
            remote.watch(lambda: inference.InferenceStatistics(rows=11, wait_seconds=0.5))
            for _ in range(100):
                remote.observe(7, ended([1.0, 3.0]))
            remote.observe(0, ended([1e6], evaluate=True))
    finally:
        for remote in remotes:
            remote.close()
        server.stop()
    figures = trainer.monitor.figures()
    assert figures["agent_steps"] == 3 * 100 * 7
    assert figures["episodes"] == 3 * 100 * 2
    assert figures["return_mean_100"] == 2.0
    assert figures["evaluation_episodes"] == 3
    statistics = trainer.watched[0]()
    assert statistics.rows == 33
    assert statistics.wait_seconds == 1.5


def test_bytes_of_parameters_are_counted_once_a_version(trainer):
    server = serve(trainer)
    remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
    try:
        remote.watch(lambda: inference.InferenceStatistics(network_bytes_unrolls=2**40 + 1))
        assert remote.get(DEVICE, timeout=30).version == 0
        trainer.publish(1)
        wait_for(lambda: remote.get(DEVICE).version == 1)
        # Exchanges go on meanwhile, without news.
        remote.observe(7, None)
        wait_for(lambda: trainer.monitor.figures()["agent_steps"] == 7)
    finally:
        remote.close()
        server.stop()
    leaves = jax.tree_util.tree_leaves(trainer.params)
    statistics = trainer.watched[0]()
    assert statistics.network_bytes_parameters == 2 * learner_service.layout_of(leaves).nbytes(1)
    assert statistics.network_bytes_parameters >= 2 * sum(leaf.nbytes for leaf in leaves)
    assert statistics.network_bytes_unrolls == 2**40 + 1


def test_what_is_counted_while_an_exchange_is_under_way_is_not_lost_by_a_close(trainer):
    under_way, go_on = threading.Event(), threading.Event()
    receive = trainer.observe

    def slow(*report):
        under_way.set()
        assert go_on.wait(30)
        receive(*report)

    trainer.observe = slow
    server = serve(trainer)
    remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
    try:
        assert under_way.wait(30)
        remote.observe(7, None)
        closing = threading.Thread(target=remote.close)
        closing.start()
        go_on.set()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        go_on.set()
        remote.close()
        server.stop()
    assert trainer.monitor.figures()["agent_steps"] == 7


def test_a_repeated_report_is_not_counted_again(trainer):
    front = remote_learner.LearnerFront(trainer, DEVICE)
    from seedlib.components.transport.learner_service import Report

    report = Report("a", 0, 5, {}, {})
    assert front.receive(report)
    assert front.receive(report)
    front.receive(report._replace(sequence=1))
    assert trainer.monitor.figures()["agent_steps"] == 10


def test_the_learner_says_when_the_run_is_over():
    trainer = StubTrainer(make_agent(), num_steps=10)
    server = serve(trainer)
    client = learner_client.LearnerClient(
        server.address, jax.tree_util.tree_leaves(trainer.params), QUICK
    )
    client.start()
    try:
        client.newest(timeout=30)
        assert client.go_on
        client.count(10, None)
        wait_for(lambda: not client.go_on)
    finally:
        client.close()
        server.stop()


def test_other_parameters_are_refused_naming_the_first_difference(trainer):
    server = serve(trainer)
    other = make_agent(hidden_sizes=(32,))
    remote = remote_learner.RemoteLearner(server.address, other, QUICK)
    try:
        with pytest.raises(service.Refused, match=r"expected .*got"):
            remote.get(DEVICE, timeout=30)
    finally:
        remote.close()
        server.stop()


def test_another_token_is_refused(trainer):
    server = serve(trainer, token="another")
    remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
    try:
        with pytest.raises(service.Refused, match="token"):
            remote.get(DEVICE, timeout=30)
    finally:
        remote.close()
        server.stop()


def test_hostile_requests_get_an_error_and_the_server_lives(trainer):
    import grpc

    server = serve(trainer)
    channel = grpc.insecure_channel(server.address)
    call = channel.unary_unary("/seedlib.LearnerService/Exchange")
    try:
        token = b"SEEDLRN1" + (6).to_bytes(4, "little") + b"secret"
        for message in (
            b"",
            b"x" * 100,
            token,
            token + b"{}",
            token + b'{"version": 1}',
            b"\x80\x04",
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(message, timeout=30)
            assert error.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.UNAUTHENTICATED,
            )
        remote = remote_learner.RemoteLearner(server.address, trainer.agent, QUICK)
        assert remote.get(DEVICE, timeout=30).version == 0
        remote.close()
    finally:
        channel.close()
        server.stop()


def test_inference_outlives_a_learner_that_restarts(trainer):
    server = serve(trainer)
    address = server.address
    remote = remote_learner.RemoteLearner(address, trainer.agent, QUICK)
    try:
        assert remote.get(DEVICE, timeout=30).version == 0
        server.stop()
        remote.observe(3, None)
        assert remote.get(DEVICE).version == 0
        trainer.publish(5)
        server = serve(trainer, address)
        wait_for(lambda: remote.get(DEVICE).version == 5)
        wait_for(lambda: trainer.monitor.figures()["agent_steps"] == 3)
    finally:
        remote.close()
        server.stop()


def test_a_learner_that_stays_away_is_an_error(trainer):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = learner_client.LearnerClientConfig(period=0.01, connect_timeout=0.3)
    remote = remote_learner.RemoteLearner(address, trainer.agent, config)
    try:
        with pytest.raises(service.Unavailable, match="out of reach"):
            remote.get(DEVICE, timeout=30)
    finally:
        remote.close()
