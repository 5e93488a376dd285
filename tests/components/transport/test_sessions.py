"""Sessions over real gRPC: what is answered, what is refused, and who does not notice."""

import logging
import threading

import dm_env
import grpc
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from seedlib.components.transport import client, messages, service, streams, wire
from tests.components.transport import fakes


@pytest.fixture(params=[True, False], ids=["direct", "queue"])
def direct(request):
    return request.param


def test_actions_are_the_ones_of_the_service(direct):
    with fakes.serving(fakes.FakeService(), direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        for seed in range(20):
            steps = fakes.make_time_steps(seed=seed)
            result = session.step(steps)
            expected = fakes.act(steps)
            tree.assert_same_structure(result, expected)
            tree.map_structure(np.testing.assert_array_equal, result, expected)
        session.close()


def test_sending_and_receiving_apart_is_a_step(direct):
    with fakes.serving(fakes.FakeService(), direct) as (_, remote):
        sessions = [remote.open(fakes.make_hello((index,))) for index in range(3)]
        for seed in range(20):
            steps = [fakes.make_time_steps(1, seed=3 * seed + index) for index in range(3)]
            for session, sent in zip(sessions, steps, strict=True):
                session.send(sent)
            for session, sent in zip(sessions, steps, strict=True):
                result, expected = session.receive(), fakes.act(sent)
                tree.map_structure(np.testing.assert_array_equal, result, expected)


def test_what_is_sent_is_copied_before_send_returns(direct):
    with fakes.serving(fakes.FakeService(), direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        steps = fakes.make_time_steps()
        expected = tree.map_structure(np.copy, fakes.act(steps))
        session.send(steps)
        tree.map_structure(lambda leaf: leaf.fill(0), steps)
        tree.map_structure(np.testing.assert_array_equal, session.receive(), expected)


def test_a_session_has_one_answer_under_way(direct):
    with fakes.serving(fakes.FakeService(), direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        with pytest.raises(service.Unavailable, match="waits for no answer"):
            session.receive()
        session = remote.open(fakes.make_hello())
        session.send(fakes.make_time_steps())
        with pytest.raises(service.Unavailable, match="waits for an answer already"):
            session.send(fakes.make_time_steps())


def test_a_session_may_be_closed_before_its_answer_is_received(direct):
    policy_service = fakes.FakeService()
    with fakes.serving(policy_service, direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        session.send(fakes.make_time_steps())
        session.close()
        assert policy_service.sessions[0].closed.wait(fakes.PATIENCE)
        with pytest.raises(service.Unavailable, match="closed"):
            session.receive()


def test_an_answer_to_what_was_sent_has_a_deadline(direct):
    policy_service = fakes.FakeService()
    policy_service._answer = policy_service.block
    with fakes.serving(policy_service, direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        session.send(fakes.make_time_steps())
        with pytest.raises(service.Unavailable, match=r"did not answer within 0\.1 s"):
            session.receive(0.1)


def test_the_service_sees_the_hello_and_the_steps_as_they_are():
    seen = []

    def answer(session, time_steps):
        seen.append(tree.map_structure(np.copy, time_steps))
        return fakes.act(time_steps)

    policy_service = fakes.FakeService(answer)
    hello = fakes.make_hello(evaluate=True)
    with fakes.serving(policy_service) as (_, remote):
        session = remote.open(hello)
        session.step(fakes.make_time_steps())
        session.close()
    assert policy_service.sessions[0].hello == hello
    assert isinstance(seen[0], dm_env.TimeStep)
    tree.map_structure(np.testing.assert_array_equal, seen[0], fakes.make_time_steps())


def test_the_stream_is_the_cheap_one_where_grpcio_allows_it():
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stream = streams.open_stream(channel, "/a/b")
        assert isinstance(stream, streams.DirectStream)
        stream.cancel()
        stream.finish()


def test_a_grpcio_with_other_internals_gets_the_public_stream():
    with grpc.insecure_channel("127.0.0.1:1") as channel:

        class Public:
            """All that the public interface promises of a channel."""

            stream_stream = channel.stream_stream

        stream = streams.open_stream(Public(), "/a/b")
        assert isinstance(stream, streams.QueueStream)
        stream.cancel()
        stream.finish()


def test_closing_frees_the_rows_before_it_returns(direct):
    policy_service = fakes.FakeService()
    with fakes.serving(policy_service, direct) as (_, remote):
        session = remote.open(fakes.make_hello())
        session.close()
        assert policy_service.sessions[0].closes == 1
        session.close()
        with pytest.raises(service.Unavailable, match="closed"):
            session.step(fakes.make_time_steps())
    assert policy_service.sessions[0].closes == 1


def test_bytes_of_time_steps_and_actions_are_counted_exactly(direct):
    request = wire.time_step_layout(fakes.OBSERVATION)
    answer = wire.action_layout(fakes.ACTION)
    with fakes.serving(fakes.FakeService(), direct) as (policy_server, remote):
        sessions = [remote.open(fakes.make_hello(ids)) for ids in ((0, 1), (2, 3, 4))]
        # Neither a greeting nor its answer is one of them.
        assert policy_server.network_bytes == 0
        expected = 0
        for _ in range(7):
            for session, rows in zip(sessions, (2, 3), strict=True):
                session.step(fakes.make_time_steps(rows))
                expected += request.nbytes(rows) + answer.nbytes(rows)
                assert policy_server.network_bytes == expected
        for session in sessions:
            session.close()
    # Nor are they forgotten with their streams.
    assert policy_server.network_bytes == expected > 7 * 5 * (6 + 2)


def test_a_watcher_is_given_the_bytes_that_its_server_passes():
    class Watcher(fakes.FakeService):
        def watch_network(self, network_bytes):
            self.network_bytes = network_bytes

    watcher = Watcher()
    with fakes.serving(watcher) as (policy_server, remote):
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())
        assert watcher.network_bytes() == policy_server.network_bytes > 0


def test_sessions_of_many_threads_do_not_mix():
    with fakes.serving(fakes.FakeService()) as (_, remote):

        def run(index):
            session = remote.open(fakes.make_hello(ids=(index,)))
            for seed in range(30):
                steps = fakes.make_time_steps(rows=1, seed=100 * index + seed)
                tree.map_structure(
                    np.testing.assert_array_equal, session.step(steps), fakes.act(steps)
                )
            session.close()

        for call in [fakes.Call(run, index) for index in range(6)]:
            call.result()


def test_an_observation_beyond_grpcs_default_limit_works(direct):
    # gRPC alone refuses more than 4 MB.
    observation, action = dm_specs.Array((5_000_000,), np.uint8), dm_specs.DiscreteArray(256)
    policy_service = fakes.FakeService(lambda _, steps: steps.observation[:, -1].astype(np.int32))
    limit = wire.message_limit(observation, action, 1)
    config = client.ClientConfig(max_message_bytes=limit, direct=direct)
    with fakes.serving(policy_service, client_config=config, max_message_bytes=limit) as (
        _,
        remote,
    ):
        session = remote.open(fakes.make_hello((1,), observation, action))
        pixels = np.full((1, 5_000_000), 201, np.uint8)
        one = np.zeros(1, np.float32)
        assert session.step(dm_env.TimeStep(np.zeros(1, np.uint8), one, one, pixels)) == [201]
        session.close()


def test_rows_beyond_the_limit_are_refused_at_the_start_with_both_numbers():
    # 2 MB per row; with the three small blocks of 8 bytes, two rows have 4_000_024 bytes.
    observation = dm_specs.Array((2_000_000,), np.uint8)
    hello = fakes.make_hello((1, 2), observation)
    generous, tight = client.ClientConfig(), client.ClientConfig(max_message_bytes=3_000_000)
    text = "request of 2 environments has 4000024 bytes; this {} max_message_bytes is 3000000"
    for config, side, limit in (
        (generous, "server's", 3_000_000),
        (tight, "client's", 64 << 20),
    ):
        with (
            fakes.serving(fakes.FakeService(), client_config=config, max_message_bytes=limit) as (
                _,
                remote,
            ),
            pytest.raises(service.Refused, match=text.format(side)),
        ):
            remote.open(hello)


def test_another_spec_is_refused_by_path_and_both_shapes():
    policy_service = fakes.FakeService(observation=fakes.OBSERVATION, action=fakes.ACTION)
    other = {**fakes.OBSERVATION, "pixels": dm_specs.Array((4, 4), np.uint8)}
    more = {**fakes.ACTION, "move": dm_specs.DiscreteArray(6)}
    with fakes.serving(policy_service) as (_, remote):
        with pytest.raises(
            service.Refused,
            match=r"observation/pixels: expected uint8 \(3, 2\), got uint8 \(4, 4\)",
        ):
            remote.open(fakes.make_hello(observation=other))
        with pytest.raises(service.Refused, match="action/move: expected num_values 5, got 6"):
            remote.open(fakes.make_hello(action=more))
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())


def test_rows_of_the_wrong_shape_are_refused_before_they_are_sent():
    policy_service = fakes.FakeService()
    with fakes.serving(policy_service) as (_, remote):
        bad = fakes.make_time_steps()
        bad.observation["pixels"] = np.zeros((2, 3, 3), np.uint8)
        for steps, text in (
            (bad, r"observation/pixels: expected uint8 \(2, 3, 2\), got uint8 \(2, 3, 3\)"),
            (fakes.make_time_steps(rows=3), "expected rows of 2 environments, got 3"),
        ):
            session = remote.open(fakes.make_hello())
            with pytest.raises(service.Refused, match=text):
                session.step(steps)
            assert policy_service.sessions[-1].closed.wait(fakes.PATIENCE)


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (service.Refused("observation/x: bad"), service.Refused, "observation/x: bad"),
        (service.Fenced("incarnation b took over"), service.Fenced, "incarnation b took over"),
        (service.Unavailable("closing"), service.Unavailable, "closing"),
        (ZeroDivisionError("by zero"), service.Unavailable, "ZeroDivisionError: by zero"),
    ],
)
def test_errors_of_a_step_arrive_as_themselves_and_end_one_session(error, expected, text, direct):
    def answer(session, time_steps):
        if session.hello.actor_id == "bad":
            raise error
        return fakes.act(time_steps)

    policy_service = fakes.FakeService(answer)
    with fakes.serving(policy_service, direct) as (_, remote):
        good = remote.open(fakes.make_hello((1,), actor_id="good"))
        bad = remote.open(fakes.make_hello((2,), actor_id="bad"))
        with pytest.raises(expected, match=text):
            bad.step(fakes.make_time_steps(1))
        assert policy_service.sessions[1].closed.wait(fakes.PATIENCE)
        with pytest.raises(service.Unavailable, match="closed"):
            bad.step(fakes.make_time_steps(1))
        good.step(fakes.make_time_steps(1))
        assert not policy_service.sessions[0].closed.is_set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (service.Refused("why"), service.Refused),
        (service.Unavailable("why"), service.Unavailable),
        (KeyError("why"), service.Unavailable),
    ],
)
def test_errors_of_opening_arrive_as_themselves(error, expected):
    class Failing:
        def open(self, hello, timeout=None):
            raise error

    with (
        fakes.serving(Failing()) as (_, remote),
        pytest.raises(expected, match="why"),
    ):
        remote.open(fakes.make_hello())


def test_the_traceback_of_an_unknown_error_is_in_the_servers_log():
    def answer(session, time_steps):
        raise RuntimeError("what nobody expected")

    with _log() as records, fakes.serving(fakes.FakeService(answer)) as (_, remote):
        session = remote.open(fakes.make_hello(actor_id="number one"))
        with pytest.raises(service.Unavailable):
            session.step(fakes.make_time_steps())
    failures = [record for record in records if record.exc_info]
    assert len(failures) == 1
    assert "number one" in failures[0].getMessage()
    assert str(failures[0].exc_info[1]) == "what nobody expected"


def test_a_huge_unprintable_error_arrives_shortened_and_the_next_session_works():
    huge = b"\xff\xfe broken ".decode(errors="surrogateescape") * 2_000_000  # 20 MB

    def answer(session, time_steps):
        if session.hello.actor_id == "bad":
            raise RuntimeError(huge)
        return fakes.act(time_steps)

    with _log() as records, fakes.serving(fakes.FakeService(answer)) as (_, remote):
        with pytest.raises(service.Unavailable, match="RuntimeError") as caught:
            remote.open(fakes.make_hello(actor_id="bad")).step(fakes.make_time_steps())
        assert len(str(caught.value).encode()) < messages.MAX_STATUS_BYTES + 200
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())
    assert any(record.exc_info and str(record.exc_info[1]) == huge for record in records)


def test_actions_that_do_not_fit_are_the_services_fault():
    policy_service = fakes.FakeService(lambda _, steps: np.zeros(3, np.int64))
    with fakes.serving(policy_service) as (_, remote):
        session = remote.open(fakes.make_hello(action=dm_specs.DiscreteArray(4)))
        with pytest.raises(
            service.Unavailable, match=r"WireError: action: expected int32 \(3,\), got int64 \(3,\)"
        ):
            session.step(fakes.make_time_steps())


def test_a_wrong_token_is_refused_before_anything_else_is_parsed():
    hello = messages.encode_hello(fakes.make_hello(token="wrong-secret"))
    head = messages.split_hello(hello)
    garbage = hello[: -len(head.body)] + b"[" * 1000
    with (
        _log() as records,
        fakes.serving(fakes.FakeService(), run_token="right-secret") as (policy_server, remote),
    ):
        for token in ("wrong-secret", "", "right-secret2"):
            with pytest.raises(service.Refused, match="run token is missing or wrong"):
                remote.open(fakes.make_hello(token=token))
        _, code, details = fakes.raw_stream(policy_server.address, [garbage])
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "secret" not in details
        remote.open(fakes.make_hello(token="right-secret")).step(fakes.make_time_steps())
    assert records
    assert not [record for record in records if "secret" in record.getMessage()]


def test_another_protocol_version_is_refused_with_both_versions():
    hello = bytearray(messages.encode_hello(fakes.make_hello()))
    hello[4:6] = (7).to_bytes(2, "big")
    with fakes.serving(fakes.FakeService()) as (policy_server, _):
        _, code, details = fakes.raw_stream(policy_server.address, [bytes(hello)])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "version 7" in details
    assert str(service.PROTOCOL_VERSION) in details


def test_streams_beyond_the_limit_are_refused_at_once_and_may_come_again(direct):
    with fakes.serving(fakes.FakeService(), direct, max_streams=2) as (_, remote):
        first, second = (remote.open(fakes.make_hello((i,))) for i in range(2))
        for _ in range(10):
            with pytest.raises(service.Unavailable, match=r"all 2 streams .*RESOURCE_EXHAUSTED"):
                remote.open(fakes.make_hello((9,)))
        second.step(fakes.make_time_steps(1))
        first.close()
        _open_until_free(remote).step(fakes.make_time_steps(1))


def test_a_session_is_for_one_thread_at_a_time():
    policy_service = fakes.FakeService()
    policy_service._answer = policy_service.block
    with fakes.serving(policy_service) as (_, remote):
        session = remote.open(fakes.make_hello())
        call = fakes.Call(session.step, fakes.make_time_steps())
        assert policy_service.stepping.acquire(timeout=fakes.PATIENCE)
        with pytest.raises(service.Unavailable, match="in use by another thread"):
            session.step(fakes.make_time_steps())
        session.close()
        with pytest.raises(service.Unavailable):
            call.result()


def test_fifty_sessions_leave_no_threads_behind():
    before = threading.active_count()
    limit = 3
    with fakes.serving(fakes.FakeService(), max_streams=limit) as (_, remote):
        for _ in range(50):
            session = _open_until_free(remote)
            session.step(fakes.make_time_steps(1))
            session.close()
        handlers = [t for t in threading.enumerate() if t.name.startswith("transport-server_")]
        assert len(handlers) <= limit + 4
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("transport-")]
    assert threading.active_count() <= before + 1  # gRPC's own serving thread may still be ending.


def _open_until_free(remote):
    """A slot comes free a moment after its client has the status."""
    for _ in range(1000):
        try:
            return remote.open(fakes.make_hello((9,)))
        except service.Unavailable as error:
            assert "RESOURCE_EXHAUSTED" in str(error)
    raise AssertionError("no stream came free")


class _log:
    """The records that absl's logger gets."""

    def __enter__(self):
        self._records = []
        self._handler = logging.Handler()
        self._handler.emit = self._records.append
        logger = logging.getLogger("absl")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        # What is under test is the record; 20 MB of it on the terminal help nobody.
        self._propagate, logger.propagate = logger.propagate, False
        return self._records

    def __exit__(self, *exc_info):
        logger = logging.getLogger("absl")
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)
        logger.propagate = self._propagate
