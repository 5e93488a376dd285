"""The handshake's messages: what they carry, and what a hostile peer gets for its trouble."""

import collections
import json
import tracemalloc

import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs
from hypothesis import given, settings
from hypothesis import strategies as st

from seedlib.components.transport import messages, wire
from tests.components.transport import fakes

_LIMIT = 1 << 20
_WORDS = ["leaf", "dict", "tuple", "list", "namedtuple"]
_WORDS += ["dtype", "shape", "minimum", "maximum", "num_values"]
Pair = collections.namedtuple("Pair", ["left", "right"])


def _through_json(spec, limit=_LIMIT):
    return messages.decode_spec(json.loads(json.dumps(messages.encode_spec(spec, "s"))), "s", limit)


def _leaf(**content):
    return {"leaf": {"dtype": "<f4", "shape": [2], **content}}


def test_a_hello_comes_back_as_it_was():
    hello = fakes.make_hello(ids=(np.int64(5), 0), token="geheim", evaluate=True, actor_id="ä 1")
    head = messages.split_hello(messages.encode_hello(hello))
    assert head.token == b"geheim"
    result = messages.decode_hello(head, _LIMIT)
    assert result == hello
    assert all(type(number) is int for number in result.environment_ids)


@pytest.mark.parametrize(
    "spec",
    [
        fakes.OBSERVATION,
        fakes.ACTION,
        (),
        {"empty": {}},
        dm_specs.BoundedArray((2, 2), np.float32, -np.inf, np.inf),
        dm_specs.BoundedArray((2,), np.uint8, [0, 1], 255),
        dm_specs.BoundedArray((2,), np.float64, 0.1, [1 / 3, 2.0]),
        dm_specs.BoundedArray((2,), np.bool_, False, True),
        dm_specs.BoundedArray((0,), np.float32, 0, 1),
        dm_specs.BoundedArray((), np.uint64, 0, 2**64 - 1),
        dm_specs.BoundedArray((84, 84, 4), np.uint8, np.zeros((84, 84, 4)), 255),
        dm_specs.DiscreteArray(7, np.int64),
        Pair(dm_specs.DiscreteArray(2), [dm_specs.Array((1,), np.float16)]),
    ],
)
def test_a_spec_comes_back_equal(spec):
    result = _through_json(spec)
    tree.assert_same_structure(spec, result)
    for before, after in zip(tree.flatten(spec), tree.flatten(result), strict=True):
        assert type(before) is type(after)
        assert before == after
        assert getattr(before, "num_values", None) == getattr(after, "num_values", None)


def test_a_named_tuple_comes_back_as_one_class_for_the_same_names():
    spec = Pair(dm_specs.DiscreteArray(2), dm_specs.DiscreteArray(3))
    assert _through_json(spec).right.num_values == 3
    assert type(_through_json(spec)) is type(_through_json(spec))


def test_bounds_that_differ_too_much_are_left_out_and_uniform_ones_are_one_number():
    many = np.arange(messages.MAX_BOUNDS + 1, dtype=np.float32)
    assert type(_through_json(dm_specs.BoundedArray(many.shape, np.float32, 0, many))) is (
        dm_specs.Array
    )
    uniform = messages.encode_spec(dm_specs.BoundedArray((9, 9), np.uint8, 0, 255), "s")
    assert uniform["leaf"]["maximum"] == 255


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"actor_id": "x" * 257}, "actor_id"),
        ({"actor_id": "line\nforged"}, "actor_id"),
        ({"incarnation": "x" * 257}, "incarnation"),
        ({"environment_ids": ()}, "environment_ids"),
        ({"environment_ids": (1, 1)}, "environment_ids must differ"),
        ({"environment_ids": (-1,)}, "environment_ids"),
        ({"environment_ids": (2**31,)}, "environment_ids"),
        ({"environment_ids": range(messages.MAX_ENVIRONMENTS + 1)}, "environment_ids"),
        ({"observation_spec": {"a": dm_specs.StringArray(())}}, r"observation/a: shape \(\)"),
        ({"action_spec": {"a": 1}}, "action/a: expected a dm_env.specs.Array, got int"),
        ({"action_spec": {1: dm_specs.DiscreteArray(2)}}, "action: key must be printable text"),
        ({"run_token": "x" * 1025}, "run_token: 1025 bytes"),
    ],
)
def test_a_hello_out_of_bounds_is_refused_before_it_is_sent(changes, text):
    with pytest.raises(wire.WireError, match=text):
        messages.encode_hello(fakes.make_hello(**changes))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        {},
        {"leaf": []},
        {"leaf": {"dtype": "<f4"}},
        {"tuple": [], "list": []},
        {"object": "os.system"},
        _leaf(dtype="O"),
        _leaf(dtype="|O"),
        _leaf(dtype=">f4"),
        _leaf(dtype="<f4,<f4"),
        _leaf(dtype=[["a", "<f4"]]),
        _leaf(shape=[-1]),
        _leaf(shape=[1.0]),
        _leaf(shape=[True]),
        _leaf(shape=[1] * 17),
        _leaf(shape=[2**31]),
        _leaf(shape=2),
        _leaf(shape=[2**20]),
        _leaf(shape=[2**31 - 1] * 16),
        _leaf(shape=[0, *[2**31 - 1] * 15]),
        _leaf(minimum=0),
        _leaf(minimum=2, maximum=1),
        _leaf(minimum="0", maximum=1),
        _leaf(minimum=None, maximum=1),
        _leaf(minimum=[0, 0, 0], maximum=1),
        _leaf(minimum=[[0], 0], maximum=1),
        _leaf(dtype="|u1", minimum=-1, maximum=1),
        _leaf(dtype="|u1", minimum=0, maximum=0.5),
        _leaf(num_values=3),
        _leaf(dtype="<i4", shape=[], num_values=0),
        _leaf(dtype="<i4", shape=[], num_values=2**62),
        _leaf(dtype="<i4", shape=[], num_values=2**80),
        _leaf(dtype="<i4", shape=[], num_values=True),
        _leaf(dtype="<f4", shape=[], num_values=3),
        _leaf(extra=1),
        {"dict": {"k" * 257: _leaf()}},
        {"namedtuple": ["P", [["a", _leaf()], ["a", _leaf()]]]},
        {"namedtuple": ["P", [["_a", _leaf()]]]},
        {"namedtuple": ["P", [["class", _leaf()]]]},
        {"namedtuple": ["P", [["a=1):\n pass", _leaf()]]]},
        {"namedtuple": ["P(", [["a", _leaf()]]]},
        {"namedtuple": ["P", [["a"]]]},
        {"namedtuple": ["P", [[["a"], _leaf()]]]},
        {"namedtuple": "P"},
        {"list": [{"tuple": []}] * (messages.MAX_LEAVES + 1)},
    ],
)
def test_a_malformed_spec_is_refused(spec):
    with pytest.raises(wire.WireError):
        messages.decode_spec(spec, "observation", _LIMIT)


def test_a_spec_nested_too_deep_is_refused():
    spec = _leaf()
    for _ in range(messages.MAX_DEPTH + 1):
        spec = {"list": [spec]}
    with pytest.raises(wire.WireError, match="nested deeper"):
        messages.decode_spec(spec, "observation", _LIMIT)


def test_the_limit_is_on_all_leaves_together():
    spec = {"list": [_leaf(shape=[1000])] * 3}  # 4000 bytes each.
    messages.decode_spec(spec, "observation", 12_000)
    with pytest.raises(wire.WireError, match=r"observation/2: float32 .1000,.*11999 bytes"):
        messages.decode_spec(spec, "observation", 11_999)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: (
        st.lists(part, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "leaf",
                    "dict",
                    "tuple",
                    "list",
                    "namedtuple",
                    "dtype",
                    "shape",
                    "minimum",
                    "maximum",
                    "num_values",
                ]
            ),
            part | st.sampled_from(["<f4", "|b1", "<i4"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(value=_json)
def test_no_json_gets_past_the_decoder_but_as_a_spec(value):
    try:
        spec = messages.decode_spec(value, "observation", _LIMIT)
    except wire.WireError:
        return
    wire.time_step_layout(spec).nbytes(2)


@settings(max_examples=200, deadline=None)
@given(tail=st.binary(max_size=200), magic=st.booleans())
def test_random_bytes_are_no_hello(tail, magic):
    message = (messages.MAGIC if magic else b"") + tail
    with pytest.raises(wire.WireError):
        messages.decode_hello(messages.split_hello(message), _LIMIT)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_hello_cut_short_or_changed_raises_nothing_else(data):
    message = bytearray(messages.encode_hello(fakes.make_hello(token="t")))
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    else:
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        messages.decode_hello(messages.split_hello(bytes(message)), _LIMIT)
    except wire.WireError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b'"' + b"x" * 1000, b"\xff\xfe", b"NaN"],
)
def test_a_json_bomb_is_refused(body):
    with pytest.raises(wire.WireError, match="hello"):
        messages.decode_hello(messages.Head(1, b"", body), _LIMIT)


def test_sizes_that_a_peer_names_are_not_allocated():
    spec = messages.encode_spec(dm_specs.BoundedArray((2,), np.uint8, 0, 255), "s")
    spec["leaf"]["shape"] = [2**31 - 1]
    head = messages.split_hello(messages.encode_hello(fakes.make_hello()))
    body = json.loads(head.body)
    body["observation_spec"] = spec
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError, match="observation"):
            messages.decode_hello(head._replace(body=json.dumps(body).encode()), _LIMIT)
        assert tracemalloc.get_traced_memory()[1] < _LIMIT
    finally:
        tracemalloc.stop()


def test_a_handshake_beyond_its_limit_is_refused_unread():
    with pytest.raises(wire.WireError, match="bytes"):
        messages.split_hello(messages.MAGIC + bytes(messages.MAX_HANDSHAKE_BYTES))


def test_the_answer_is_compared_with_the_own_layout():
    request, answer = wire.time_step_layout(fakes.OBSERVATION), wire.action_layout(fakes.ACTION)
    messages.check_answer(messages.encode_answer(request, answer, 2), request, answer, 2)
    for other in (
        messages.encode_answer(request, request, 2),
        messages.encode_answer(request, answer, 3),
        b"[]",
        b"{}",
        b"\x80\x04",
        b"[" * 100_000,
    ):
        with pytest.raises(wire.WireError, match="answer to hello"):
            messages.check_answer(other, request, answer, 2)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(), max_size=300), limit=st.integers(60, 200))
def test_a_shortened_text_is_short_and_valid(text, limit):
    short = messages.shorten(text, limit)
    assert len(short.encode()) <= limit  # And it encodes: no lone surrogates are left.
    if len(text.encode(errors="backslashreplace")) <= limit:
        assert short == text.encode(errors="backslashreplace").decode()
    else:
        assert short.endswith(f"({len(text)} characters)")


def test_an_exception_that_cannot_be_printed_is_described_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise ZeroDivisionError

    assert messages.describe(Mute()) == "(Mute whose text raises ZeroDivisionError)"
