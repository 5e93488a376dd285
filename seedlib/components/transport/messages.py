"""The first message of a stream and its answer: a token, then JSON that is parsed with suspicion.

A hello is `MAGIC`, the protocol version and the size of the token (two big-endian uint16), the
token, and JSON to the end. The token lies in front so that it can be checked before anything that
an unknown peer wrote is parsed. Whatever comes from a peer is bounded: text, depth, leaves, sizes.
"""

import collections
import functools
import json
import keyword
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from dm_env import specs as dm_specs

from seedlib import types
from seedlib.components.transport import service, wire

MAGIC = b"SEED"
MAX_HANDSHAKE_BYTES = wire.MESSAGE_HEADROOM // 2
MAX_TOKEN_BYTES = 1024
MAX_TEXT = 256
"""Characters of an actor id, an incarnation or a key of a mapping."""
MAX_ENVIRONMENTS = 1 << 14
MAX_LEAVES = 1024
MAX_DEPTH = 32
MAX_DIMENSIONS = 16
MAX_BOUNDS = 4096
"""Bounds of a leaf that are sent one by one; where more of them differ, none are sent."""
MAX_STATUS_BYTES = 1000
"""Of the text of a gRPC status: three times that, percent-encoded, fits the default header."""

_HEAD = struct.Struct(f">{len(MAGIC)}sHH")
_MAX_INT32 = 2**31 - 1
_HELLO_KEYS = {
    "actor_id",
    "environment_ids",
    "incarnation",
    "evaluate",
    "observation_spec",
    "action_spec",
}


class Head(NamedTuple):
    """The part of a hello in front of its JSON.

    Attributes:
      version: the protocol version that the peer speaks.
      token: the run token, as sent.
      body: the JSON, not yet parsed.
    """

    version: int
    token: bytes
    body: bytes


def encode_hello(hello: service.Hello) -> bytes:
    """Returns the first message of a stream.

    Raises:
      wire.WireError: where a part of the hello is out of bounds, naming it.
    """
    token = hello.run_token.encode()
    if len(token) > MAX_TOKEN_BYTES:
        raise wire.WireError(
            f"run_token: {len(token)} bytes, at most {MAX_TOKEN_BYTES} can be sent"
        )
    body = {
        "actor_id": _text(hello.actor_id, "actor_id"),
        "environment_ids": _environment_ids(
            [int(environment_id) for environment_id in hello.environment_ids]
        ),
        "incarnation": _text(hello.incarnation, "incarnation"),
        "evaluate": bool(hello.evaluate),
        "observation_spec": encode_spec(hello.observation_spec, "observation"),
        "action_spec": encode_spec(hello.action_spec, "action"),
    }
    message = _HEAD.pack(MAGIC, service.PROTOCOL_VERSION, len(token)) + token + _dump(body)
    if len(message) > MAX_HANDSHAKE_BYTES:
        raise wire.WireError(f"hello: {len(message)} bytes, at most {MAX_HANDSHAKE_BYTES} are sent")
    return message


def split_hello(message: bytes) -> Head:
    """Cuts a hello without parsing its JSON.

    Raises:
      wire.WireError: where the message is no hello.
    """
    if len(message) > MAX_HANDSHAKE_BYTES:
        raise wire.WireError(f"hello: {len(message)} bytes, at most {MAX_HANDSHAKE_BYTES} are read")
    if len(message) < _HEAD.size or not message.startswith(MAGIC):
        raise wire.WireError("hello: the first message of the stream is no hello of this protocol")
    _, version, size = _HEAD.unpack_from(message)
    token = message[_HEAD.size : _HEAD.size + size]
    if len(token) != size or size > MAX_TOKEN_BYTES:
        raise wire.WireError("hello: the first message of the stream is cut short")
    return Head(version, token, message[_HEAD.size + size :])


def decode_hello(head: Head, max_message_bytes: int) -> service.Hello:
    """Parses the JSON of a hello whose token was accepted.

    Args:
      head: what `split_hello` returned.
      max_message_bytes: specs whose single row is larger are refused.

    Raises:
      wire.WireError: where anything is malformed or out of bounds, naming it.
    """
    body = _load(head.body, "hello")
    if not isinstance(body, dict) or set(body) != _HELLO_KEYS:
        raise wire.WireError(f"hello: expected the keys {sorted(_HELLO_KEYS)}")
    if not isinstance(body["evaluate"], bool):
        raise wire.WireError("hello: evaluate must be true or false")
    return service.Hello(
        actor_id=_text(body["actor_id"], "actor_id"),
        environment_ids=_environment_ids(body["environment_ids"]),
        incarnation=_text(body["incarnation"], "incarnation"),
        evaluate=body["evaluate"],
        observation_spec=decode_spec(body["observation_spec"], "observation", max_message_bytes),
        action_spec=decode_spec(body["action_spec"], "action", max_message_bytes),
        run_token=head.token.decode(errors="replace"),
    )


def encode_answer(request: wire.Layout, answer: wire.Layout, rows: int) -> bytes:
    """Returns the answer to a hello: the layouts that the server will use.

    Args:
      request: of the time steps.
      answer: of the actions.
      rows: in each message.
    """
    return _dump(
        {
            "rows": rows,
            "request": _encode_signature(request),
            "request_bytes": request.nbytes(rows),
            "answer": _encode_signature(answer),
            "answer_bytes": answer.nbytes(rows),
        }
    )


def check_answer(message: bytes, request: wire.Layout, answer: wire.Layout, rows: int) -> None:
    """Compares the layouts in the answer to a hello with one's own.

    Raises:
      wire.WireError: at the first difference.
    """
    if len(message) > MAX_HANDSHAKE_BYTES:
        raise wire.WireError(f"answer to hello: {len(message)} bytes")
    given = _load(message, "answer to hello")
    expected = _load(encode_answer(request, answer, rows), "answer to hello")
    if given == expected:
        return
    if not isinstance(given, dict):
        raise wire.WireError("answer to hello: expected a mapping")
    for key, value in expected.items():
        if given.get(key) != value:
            raise wire.WireError(
                f"answer to hello: {key}: expected {_cut(json.dumps(value), MAX_TEXT)}, "
                f"got {_cut(json.dumps(given.get(key)), MAX_TEXT)}"
            )
    raise wire.WireError(f"answer to hello: expected the keys {sorted(expected)}")


def encode_spec(spec: types.Nested, path: str) -> Any:
    """Returns nested `dm_env.specs.Array` as JSON values: structure, dtypes, shapes and bounds.

    Names of leaves are not sent. Bounds that are all the same are sent as one number.

    Args:
      spec: dicts, tuples, lists and named tuples of array specs.
      path: what to call it in messages.

    Raises:
      wire.WireError: where a dtype cannot be sent or a key of a mapping is no short text.
    """
    if isinstance(spec, Mapping):
        parts = {_text(key, f"{path}: key"): part for key, part in spec.items()}
        return {"dict": {key: encode_spec(part, f"{path}/{key}") for key, part in parts.items()}}
    if wire.is_namedtuple(spec):
        fields = [
            [name, encode_spec(part, f"{path}/{name}")]
            for name, part in zip(spec._fields, spec, strict=True)
        ]
        return {"namedtuple": [type(spec).__name__, fields]}
    if isinstance(spec, tuple | list):
        kind = "list" if isinstance(spec, list) else "tuple"
        return {kind: [encode_spec(part, f"{path}/{index}") for index, part in enumerate(spec)]}
    if not isinstance(spec, dm_specs.Array):
        raise wire.WireError(f"{path}: expected a dm_env.specs.Array, got {type(spec).__name__}")
    try:
        leaf: dict[str, Any] = {
            "dtype": wire.wire_dtype(spec.dtype).str,
            "shape": list(spec.shape),
        }
    except wire.WireError as error:
        raise wire.WireError(f"{path}: shape {spec.shape}: {error}") from None
    if isinstance(spec, dm_specs.DiscreteArray):
        leaf["num_values"] = int(spec.num_values)
    elif isinstance(spec, dm_specs.BoundedArray):
        bounds = [_encode_bound(bound, spec.shape) for bound in (spec.minimum, spec.maximum)]
        if None not in bounds:
            leaf["minimum"], leaf["maximum"] = bounds
    return {"leaf": leaf}


def decode_spec(value: Any, path: str, max_bytes: int) -> types.Nested:
    """Returns the nested specs that `encode_spec` described.

    Nothing is allocated by a size that the peer names before that size is checked.

    Args:
      value: JSON values, from anyone.
      path: what to call it in messages.
      max_bytes: that all leaves of one row may have together.

    Raises:
      wire.WireError: where anything is malformed or out of bounds, naming the path.
    """
    return _Decoder(max_bytes).decode(value, path, 0)


def describe(error: BaseException) -> str:
    """Returns the text of an exception, shortened for a gRPC status, whatever it holds."""
    try:
        text = str(error)
    except Exception as second:  # An exception of a stranger may fail to print.
        text = f"({type(error).__name__} whose text raises {type(second).__name__})"
    return shorten(text)


def shorten(text: str, limit: int = MAX_STATUS_BYTES) -> str:
    """Returns `text` as valid UTF-8 of at most `limit` bytes; what is cut off is counted.

    Raises:
      ValueError: where `limit` leaves no room for that count.
    """
    # Cut before encoding: the text may have many megabytes.
    data = text[: limit + 1].encode(errors="backslashreplace")
    if len(data) <= limit and len(text) <= limit:
        return data.decode()
    tail = f"... ({len(text)} characters)"
    if limit <= len(tail):
        raise ValueError(f"limit must be above {len(tail)} bytes, got {limit}")
    return data[: limit - len(tail)].decode(errors="ignore") + tail


class _Decoder:
    """Builds a spec from JSON values, and counts what it has built."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._bytes = 0
        self._leaves = 0

    def decode(self, value: Any, path: str, depth: int) -> types.Nested:
        if depth > MAX_DEPTH:
            raise wire.WireError(f"{_cut(path, MAX_TEXT)}: nested deeper than {MAX_DEPTH}")
        # Every part counts, so that empty containers are bounded as leaves are.
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise wire.WireError(f"{_cut(path, MAX_TEXT)}: more than {MAX_LEAVES} parts in a spec")
        if not isinstance(value, dict) or len(value) != 1:
            raise wire.WireError(f"{path}: expected one of dict, tuple, list, namedtuple, leaf")
        ((kind, content),) = value.items()
        if kind == "dict" and isinstance(content, dict):
            keys = [_text(key, f"{path}: key") for key in content]
            return {key: self.decode(content[key], f"{path}/{key}", depth + 1) for key in keys}
        if kind in ("tuple", "list") and isinstance(content, list):
            parts = [
                self.decode(part, f"{path}/{index}", depth + 1)
                for index, part in enumerate(content)
            ]
            return tuple(parts) if kind == "tuple" else parts
        if kind == "namedtuple":
            return self._namedtuple(content, path, depth)
        if kind == "leaf" and isinstance(content, dict):
            return self._leaf(content, path)
        raise wire.WireError(f"{path}: expected one of dict, tuple, list, namedtuple, leaf")

    def _namedtuple(self, content: Any, path: str, depth: int) -> types.Nested:
        match content:
            case [str() as name, list() as fields] if (
                all(isinstance(field, list) and len(field) == 2 for field in fields)
                and len(fields) <= MAX_LEAVES
            ):
                names = tuple(field[0] for field in fields)
            case _:
                raise wire.WireError(f"{path}: malformed named tuple")
        for text in (name, *names):
            # What `namedtuple` accepts, and ASCII only: the class body is made from these names.
            plain = isinstance(text, str) and text.isascii() and text.isidentifier()
            if not plain or keyword.iskeyword(text) or len(text) > MAX_TEXT:
                raise wire.WireError(f"{path}: malformed name in a named tuple")
        if len(set(names)) != len(names) or any(text.startswith("_") for text in names):
            raise wire.WireError(f"{path}: malformed name in a named tuple")
        parts = [self.decode(part, f"{path}/{field}", depth + 1) for field, part in fields]
        return _namedtuple_class(name, names)(*parts)

    def _leaf(self, content: dict[str, Any], path: str) -> dm_specs.Array:
        keys = set(content) - {"dtype", "shape"}
        if keys not in (set(), {"num_values"}, {"minimum", "maximum"}) or not (
            content.keys() >= {"dtype", "shape"}
        ):
            raise wire.WireError(f"{path}: malformed leaf")
        dtype, shape = _dtype(content["dtype"], path), _shape(content["shape"], path)
        # Sizes of 0 are left out: NumPy refuses shapes whose other sizes are too large together.
        self._bytes += math.prod(size for size in shape if size) * dtype.itemsize
        if self._bytes > self._max_bytes:
            raise wire.WireError(
                f"{path}: {dtype.name} {shape}: one row has more than the {self._max_bytes} bytes "
                "of a message"
            )
        try:
            if "num_values" in content:
                num_values = content["num_values"]
                if type(num_values) is not int or shape != () or dtype.kind not in "iu":
                    raise ValueError("num_values is malformed")
                # DiscreteArray itself lets large numbers overflow.
                if num_values > np.iinfo(dtype).max:
                    raise ValueError(f"num_values {num_values} is out of range")
                return dm_specs.DiscreteArray(num_values, dtype)
            if "minimum" in content:
                minimum = _decode_bound(content["minimum"], dtype, shape)
                maximum = _decode_bound(content["maximum"], dtype, shape)
                return dm_specs.BoundedArray(shape, dtype, minimum, maximum)
        except (ValueError, TypeError, OverflowError) as error:
            raise wire.WireError(f"{path}: {dtype.name} {shape}: {shorten(str(error))}") from None
        return dm_specs.Array(shape, dtype)


@functools.lru_cache(maxsize=64)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> type:
    """Returns the same class for the same names, so that reconnecting actors make no new ones."""
    return collections.namedtuple(name, fields)  # type: ignore[misc]


def _encode_signature(layout: wire.Layout) -> list[list[Any]]:
    return [[path, dtype, list(shape)] for path, dtype, shape in layout.signature()]


def _encode_bound(bound: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Returns one number, a flat list of numbers, or None where too many differ."""
    if bound.size and np.all(bound == bound.flat[0]):
        return bound.flat[0].item()
    size = math.prod(shape)
    if size > MAX_BOUNDS:
        return None
    return np.broadcast_to(bound, shape).ravel().tolist()


def _decode_bound(value: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    numbers = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != math.prod(shape):
        raise ValueError(f"{len(value)} bounds for shape {shape}")
    wanted = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}[dtype.kind]
    for number in numbers:
        if type(number) not in wanted:
            raise ValueError("a bound is of another type")
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            if not info.min <= number <= info.max:
                raise ValueError("a bound is out of range")
    bound = np.array(numbers, dtype)
    return bound.reshape(shape) if isinstance(value, list) else bound[0]


def _dtype(value: Any, path: str) -> np.dtype:
    # A whitelist and not `np.dtype(value)`, which reads a language of its own.
    dtype = _DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        raise wire.WireError(f"{path}: unknown dtype {_cut(repr(value), 32)}")
    return dtype


_DTYPES = {
    np.dtype(code).newbyteorder("<").str: np.dtype(code).newbyteorder("<")
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}


def _shape(value: Any, path: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size <= _MAX_INT32 for size in value)
    ):
        raise wire.WireError(
            f"{path}: a shape is a list of at most {MAX_DIMENSIONS} sizes in 0..{_MAX_INT32}"
        )
    return tuple(value)


def _text(value: Any, name: str) -> str:
    # Printable, so that a name cannot forge a line in a log.
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise wire.WireError(f"{name} must be printable text of at most {MAX_TEXT} characters")
    return value


def _environment_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ENVIRONMENTS:
        raise wire.WireError(f"environment_ids must be 1 to {MAX_ENVIRONMENTS} integers")
    if not all(type(number) is int and 0 <= number <= _MAX_INT32 for number in value):
        raise wire.WireError(f"environment_ids must be integers in 0..{_MAX_INT32}")
    if len(set(value)) != len(value):
        raise wire.WireError("environment_ids must differ from each other")
    return tuple(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(data: bytes, name: str) -> Any:
    try:
        return json.loads(data.decode(), parse_int=_parse_int)
    # A RecursionError is how the parser answers to thousands of brackets.
    except (ValueError, RecursionError) as error:
        raise wire.WireError(f"{name}: malformed JSON: {shorten(str(error), 200)}") from None


def _parse_int(digits: str) -> int:
    if len(digits) > 20:  # A 64-bit number has no more, with its sign.
        raise ValueError("a number is too long")
    return int(digits)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
