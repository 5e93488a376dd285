"""What inference in another process needs of the learner: new parameters, and someone to count.

One exchange does both: what happened since the last one goes there, newer parameters come back.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from dm_env import specs as dm_specs

from seedlib.components.transport import wire

PROTOCOL_VERSION = 1
SERVICE_NAME = "seedlib.LearnerService"
METHOD = f"/{SERVICE_NAME}/Exchange"

_MAGIC = b"SEEDLRN1"
_ANSWER = struct.Struct("<8sq?7x")
_REQUEST = struct.Struct("<8sI")
_MAX_TEXT = 1 << 20


class Report(NamedTuple):
    """What one inference server did since its last report.

    Attributes:
      source: names the server's process; another start has another name.
      sequence: counts this source's reports from 0; a repeated one is not counted again.
      agent_steps: transitions of training environments.
      episodes: ended episodes, as `episodes.Episodes` has them, each a list.
      statistics: totals since the source's start, by name.
    """

    source: str
    sequence: int
    agent_steps: int
    episodes: Mapping[str, Sequence[float]]
    statistics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Request:
    """One exchange's question.

    Attributes:
      run_token: the run's secret; "" where there is none.
      known_version: the newest version that the client has; -1 for none.
      signature: path, dtype and shape of each leaf of the parameters that the client expects.
      report: what happened.
    """

    run_token: str = dataclasses.field(repr=False)
    known_version: int
    signature: list[list[Any]]
    report: Report


class LearnerService(Protocol):
    """What a learner offers to other processes."""

    def newest(self) -> tuple[int, list[np.ndarray]]:
        """Returns the newest version and its leaves, in the order of the agent's parameters."""
        ...

    def receive(self, report: Report) -> bool:
        """Counts a report; returns whether the run goes on."""
        ...


def layout_of(leaves: Sequence[Any]) -> wire.Layout:
    """Returns the layout of a version's leaves (anything with `shape` and `dtype`).

    Raises:
      wire.WireError: a leaf cannot be sent.
    """
    return wire.Layout(
        [dm_specs.Array(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves], "parameters"
    )


def signature_of(layout: wire.Layout) -> list[list[Any]]:
    """Returns a layout's signature as JSON has it."""
    return [[path, dtype, list(shape)] for path, dtype, shape in layout.signature()]


def encode_request(request: Request) -> bytes:
    """Returns a request's message: magic, then the token, so that it is checked first; JSON."""
    token = request.run_token.encode()
    body = {
        "version": PROTOCOL_VERSION,
        "known_version": request.known_version,
        "signature": request.signature,
        "report": request.report._asdict(),
    }
    return _REQUEST.pack(_MAGIC, len(token)) + token + json.dumps(body).encode()


def token_of(message: bytes) -> bytes:
    """Returns the token of a request; nothing else is looked at.

    Raises:
      wire.WireError: the message is no request.
    """
    if len(message) < _REQUEST.size:
        raise wire.WireError(f"expected a request, got {len(message)} bytes")
    magic, length = _REQUEST.unpack_from(message)
    if magic != _MAGIC or length > len(message) - _REQUEST.size:
        raise wire.WireError("expected a request of a seedlib inference server")
    return message[_REQUEST.size : _REQUEST.size + length]


def decode_request(message: bytes) -> Request:
    """Returns the request in a message.

    Raises:
      wire.WireError: it is none, of another protocol, or too long.
    """
    token = token_of(message)
    text = message[_REQUEST.size + len(token) :]
    if len(text) > _MAX_TEXT:
        raise wire.WireError(f"a request has at most {_MAX_TEXT} bytes, got {len(text)}")
    try:
        body = json.loads(text)
        if body["version"] != PROTOCOL_VERSION:
            raise wire.WireError(
                f"protocol version: expected {PROTOCOL_VERSION}, got {body['version']!r}"
            )
        report = body["report"]
        return Request(
            run_token=token.decode(),
            known_version=int(body["known_version"]),
            signature=[
                [str(path), str(dtype), list(shape)] for path, dtype, shape in body["signature"]
            ],
            report=Report(
                source=str(report["source"])[:200],
                sequence=int(report["sequence"]),
                agent_steps=int(report["agent_steps"]),
                episodes={
                    str(name): [float(value) for value in values]
                    for name, values in report["episodes"].items()
                },
                statistics={
                    str(name): float(value) for name, value in report["statistics"].items()
                },
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, wire.WireError):
            raise
        raise wire.WireError(f"malformed request: {type(error).__name__}") from error


def encode_answer(version: int, go_on: bool, packed: bytes) -> bytes:
    """Returns an answer: the version (-1 for none that is newer), whether to go on, parameters."""
    return _ANSWER.pack(_MAGIC, version, go_on) + packed


def decode_answer(message: bytes) -> tuple[int, bool, memoryview]:
    """Returns version, whether to go on, and the packed parameters.

    Raises:
      wire.WireError: the message is no answer.
    """
    if len(message) < _ANSWER.size:
        raise wire.WireError(f"expected an answer, got {len(message)} bytes")
    magic, version, go_on = _ANSWER.unpack_from(message)
    if magic != _MAGIC:
        raise wire.WireError("expected an answer of a seedlib learner")
    return version, go_on, memoryview(message)[_ANSWER.size :]
