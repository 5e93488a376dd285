"""What both ends of the transport share: the method's name, addresses and channel options."""

import ipaddress
from typing import Any

SERVICE_NAME = "seedlib.PolicyService"
METHOD = f"/{SERVICE_NAME}/Session"
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20

_MAX_PORT = 65535


def is_local(address: str) -> bool:
    """Returns whether only processes of the same host reach `address`.

    Args:
      address: `host:port`, `unix:path` or `unix-abstract:name`. A host name other than
        `localhost` counts as remote, whatever it resolves to.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Refuses what is no address.

    Raises:
      ValueError: naming the address.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"address must be host:port, unix:path or unix-abstract:name: {address!r}")


def check_limits(
    max_message_bytes: int, keepalive_time: float, keepalive_timeout: float, headroom: int
) -> None:
    """Refuses limits that cannot work.

    Raises:
      ValueError: naming the field and its value.
    """
    if not headroom <= max_message_bytes < 2**31:
        raise ValueError(
            f"max_message_bytes must be in {headroom}..{2**31 - 1}, got {max_message_bytes}"
        )
    for name, value in (
        ("keepalive_time", keepalive_time),
        ("keepalive_timeout", keepalive_timeout),
    ):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 seconds, got {value}")


def common_options(
    max_message_bytes: int, keepalive_time: float, keepalive_timeout: float
) -> list[tuple[str, Any]]:
    """Returns the gRPC channel options that server and client have in common.

    Args:
      max_message_bytes: largest message, either way.
      keepalive_time: seconds without a byte from the peer before it is asked for a sign of life.
      keepalive_timeout: seconds that it has to answer.
    """
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", max(1, round(keepalive_time * 1000))),
        ("grpc.keepalive_timeout_ms", max(1, round(keepalive_timeout * 1000))),
        # A slow environment leaves its stream without data for minutes; gRPC would stop asking
        # after two pings (and its ping timeout would replace the one above).
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", max(1, round(keepalive_timeout * 1000))),
    ]
