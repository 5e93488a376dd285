"""Where a server listens, whom it lets in, and what it says about its health."""

import socket
import subprocess

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seedlib.components.transport import client, options, server, service
from tests.components.transport import fakes


def _listening():
    connections = psutil.Process().net_connections(kind="inet")
    # gRPC listens on sockets of IPv6, which show 127.0.0.1 as ::ffff:127.0.0.1.
    return {
        (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
        for c in connections
        if c.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("address", ["localhost:0", "127.0.0.1:0"])
def test_the_default_is_loopback_only(address):
    before = _listening()
    with server.PolicyServer(fakes.FakeService(), server.ServerConfig(address)) as policy_server:
        assert _listening() - before == {("127.0.0.1", policy_server.port)}
        assert policy_server.address == f"127.0.0.1:{policy_server.port}"


def test_a_unix_socket_works_and_is_not_taken_from_a_live_server(tmp_path):
    address = f"unix:{tmp_path}/policy"
    with fakes.serving(fakes.FakeService(), address=address) as (_, remote):
        with pytest.raises(OSError, match="a server answers there"):
            server.PolicyServer(fakes.FakeService(), server.ServerConfig(address)).start()
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())
    with fakes.serving(fakes.FakeService(), address=address) as (_, remote):
        remote.open(fakes.make_hello()).step(fakes.make_time_steps())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:80", "example.com:80"])
def test_an_open_network_address_is_refused_by_name(address):
    with pytest.raises(ValueError, match="is open to the network") as caught:
        server.ServerConfig(address)
    assert address in str(caught.value)
    server.ServerConfig(address, run_token="secret")
    server.ServerConfig(address, allow_insecure=True)
    server.ServerConfig(address, credentials=grpc.ssl_server_credentials([(b"", b"")]))


def test_a_network_address_with_a_token_works():
    config = server.ServerConfig("0.0.0.0:0", run_token="t")
    with (
        server.PolicyServer(fakes.FakeService(), config) as policy_server,
        client.RemotePolicyService(f"127.0.0.1:{policy_server.port}") as remote,
    ):
        remote.open(fakes.make_hello(token="t")).step(fakes.make_time_steps())


@pytest.mark.parametrize(
    "local", ["localhost:1", "127.0.0.9:1", "[::1]:1", "unix:/x", "unix-abstract:x"]
)
def test_local_addresses(local):
    assert options.is_local(local)


def test_a_port_in_use_is_refused_by_name_and_its_owner_goes_on():
    with fakes.serving(fakes.FakeService()) as (policy_server, remote):
        session = remote.open(fakes.make_hello())
        for host in ("localhost", "127.0.0.1"):
            second = server.ServerConfig(f"{host}:{policy_server.port}")
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{policy_server.port}"):
                server.PolicyServer(fakes.FakeService(), second).start()
        session.step(fakes.make_time_steps())


def test_a_port_of_a_stranger_is_refused_by_name():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            server.PolicyServer(
                fakes.FakeService(), server.ServerConfig(f"localhost:{port}")
            ).start()


def test_health_follows_what_the_owner_says():
    status = health_pb2.HealthCheckResponse
    with fakes.serving(fakes.FakeService(), max_streams=1) as (policy_server, remote):
        remote.open(fakes.make_hello())  # All streams taken; health has threads of its own.
        with grpc.insecure_channel(policy_server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def check():
                names = ("", options.SERVICE_NAME)
                requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
                return {stub.Check(r, timeout=fakes.PATIENCE).status for r in requests}

            assert check() == {status.NOT_SERVING}
            policy_server.set_serving(True)
            assert check() == {status.SERVING}
            policy_server.set_serving(False)
            assert check() == {status.NOT_SERVING}


def test_health_is_not_serving_when_the_server_stops():
    status = health_pb2.HealthCheckResponse
    with fakes.serving(fakes.FakeService()) as (policy_server, _):
        policy_server.set_serving(True)
        with grpc.insecure_channel(policy_server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=fakes.PATIENCE
            )
            assert next(watch).status == status.SERVING
            policy_server.stop()
            assert next(watch).status == status.NOT_SERVING


def test_health_is_set_only_on_a_started_server():
    with pytest.raises(RuntimeError, match="not started"):
        server.PolicyServer(fakes.FakeService()).set_serving(True)


def test_tls_lets_in_who_trusts_the_certificate_and_nobody_in_the_clear(tmp_path):
    key, certificate = _certificate(tmp_path)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    trusting = client.ClientConfig(credentials=grpc.ssl_channel_credentials(certificate))
    with fakes.serving(fakes.FakeService(), client_config=trusting, credentials=credentials) as (
        policy_server,
        _,
    ):
        address = f"localhost:{policy_server.port}"
        with client.RemotePolicyService(address, trusting) as remote:
            remote.open(fakes.make_hello()).step(fakes.make_time_steps())
        with (
            client.RemotePolicyService(address) as clear,
            pytest.raises(service.Unavailable),
        ):
            clear.open(fakes.make_hello(), timeout=1.0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"address": "localhost"}, "'localhost'"),
        ({"address": "localhost:70000"}, "'localhost:70000'"),
        ({"max_streams": 0}, "max_streams must be at least 1, got 0"),
        ({"max_message_bytes": 5}, "max_message_bytes .* got 5"),
        ({"handshake_timeout": 0.0}, "handshake_timeout .* got 0.0"),
        ({"keepalive_time": -1.0}, "keepalive_time .* got -1.0"),
        ({"keepalive_timeout": 0.0}, "keepalive_timeout .* got 0.0"),
        ({"run_token": "x" * 2000}, "run_token must have at most 1024 bytes"),
    ],
)
def test_server_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        server.ServerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"open_timeout": 0.0}, {"step_timeout": -1.0}, {"close_timeout": float("inf")}],
)
def test_client_settings_that_cannot_work_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name} .* got {value}"):
        client.ClientConfig(**settings)


def test_a_token_is_in_no_representation():
    assert "secret" not in repr(server.ServerConfig(run_token="secret"))


def _certificate(folder):
    """Makes a key and a certificate for localhost that signs itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=fakes.PATIENCE)
    return key.read_bytes(), certificate.read_bytes()
