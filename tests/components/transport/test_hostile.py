"""Peers that mean harm or know no better: they fail alone."""

import os
import pickle

import grpc
import pytest

from seedlib.components.transport import messages, options, wire
from tests.components.transport import fakes

_HELLO = messages.encode_hello(fakes.make_hello())
_REQUEST = wire.time_step_layout(fakes.OBSERVATION)


class _Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        messages.MAGIC,
        messages.MAGIC + b"\0\1\xff\xff",
        _HELLO[:-1],
        _HELLO[:-20],
        _HELLO + b"x",
        _HELLO.replace(b'"evaluate":false', b'"evaluate":"no"'),
        _HELLO.replace(b'"environment_ids":[3,7]', b'"environment_ids":[3,3]'),
        _HELLO.replace(b'"shape":[3,2]', b'"shape":[2147483647,2]'),
        messages.MAGIC + b"\0\1\0\0" + b"[" * 100_000,
        messages.MAGIC + b"\0\1\0\0" + bytes(1 << 20),
        os.urandom(4096),
    ],
)
def test_a_hostile_first_message_is_refused_and_the_server_lives(first):
    policy_service = fakes.FakeService()
    with fakes.serving(policy_service) as (policy_server, remote):
        answers, code, details = fakes.raw_stream(policy_server.address, [first])
        assert (answers, code) == ([], grpc.StatusCode.INVALID_ARGUMENT)
        assert len(details.encode()) <= messages.MAX_STATUS_BYTES
        assert not policy_service.sessions
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())


def test_a_message_of_the_wrong_size_fails_alone():
    policy_service = fakes.FakeService()
    with fakes.serving(policy_service) as (policy_server, remote):
        other = remote.open(fakes.make_hello((8, 9)))
        good = _REQUEST.pack(fakes.make_time_steps())
        answers, code, details = fakes.raw_stream(policy_server.address, [_HELLO, good, good[:-8]])
        assert len(answers) == 2
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"expected {len(good)} bytes" in details
        assert f"got {len(good) - 8} bytes" in details
        assert "observation/pixels uint8 (3, 2)" in details
        assert policy_service.sessions[1].closed.wait(fakes.PATIENCE)
        other.step(fakes.make_time_steps())


def test_an_oversize_message_fails_alone():
    with fakes.serving(fakes.FakeService(), max_message_bytes=2 << 20) as (policy_server, remote):
        other = remote.open(fakes.make_hello((8, 9)))
        _, code, _ = fakes.raw_stream(policy_server.address, [_HELLO, bytes(3 << 20)])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        other.step(fakes.make_time_steps())


def test_a_pickle_is_never_unpickled(tmp_path):
    marker = tmp_path / "marker"
    evil = pickle.dumps(_Evil(marker), protocol=0)
    good = _REQUEST.pack(fakes.make_time_steps())
    padded = evil + good[len(evil) :]
    head = messages.MAGIC + b"\0\1\0\0"
    with fakes.serving(fakes.FakeService()) as (policy_server, remote):
        for sent in ([evil], [head + evil], [_HELLO, evil], [_HELLO, padded]):
            fakes.raw_stream(policy_server.address, sent)
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())
    assert not marker.exists()
    pickle.loads(evil).close()
    assert marker.exists()  # The pickle would have worked.


def test_other_methods_do_not_exist():
    with fakes.serving(fakes.FakeService()) as (policy_server, _):
        with grpc.insecure_channel(policy_server.address) as channel:
            call = channel.unary_unary(f"/{options.SERVICE_NAME}/Exec")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=fakes.PATIENCE)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
