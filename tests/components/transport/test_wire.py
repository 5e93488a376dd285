"""Packed rows: what goes in comes out, and what does not fit is refused in one line."""

import collections
import pickle

import dm_env
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from seedlib.components.transport import wire
from tests.components.transport import fakes

_CODES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def _array(shape, dtype):
    return dm_specs.Array(shape, dtype)


def _specs():
    shapes = st.one_of(
        st.just(()), st.just((0,)), hnp.array_shapes(max_dims=3, min_side=0, max_side=3)
    )
    leaf = st.builds(_array, shapes, st.sampled_from(_CODES))
    return st.recursive(
        leaf,
        lambda part: st.one_of(
            st.dictionaries(st.text("abcß/", max_size=3), part, max_size=3),
            st.lists(part, max_size=3),
            st.lists(part, max_size=3).map(tuple),
        ),
        max_leaves=6,
    )


def _same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), spec=_specs(), rows=st.integers(0, 4))
def test_any_rows_come_back_bit_for_bit(data, spec, rows):
    layout = wire.Layout(spec)
    draw = lambda leaf: data.draw(hnp.arrays(leaf.dtype, (rows, *leaf.shape)))
    values = tree.map_structure(draw, spec)

    message = layout.pack(values)
    result = layout.unpack(message, rows)

    assert len(message) == (layout.nbytes(rows) if tree.flatten(spec) else 0)
    tree.assert_same_structure(result, values, check_types=True)
    for before, after in zip(tree.flatten(values), tree.flatten(result), strict=True):
        assert _same(before, after)
        assert not after.flags.writeable


@settings(max_examples=50, deadline=None)
@given(data=st.data(), code=st.sampled_from(_CODES[2:]), shape=hnp.array_shapes(max_dims=3))
def test_byte_order_and_strides_of_the_source_do_not_matter(data, code, shape):
    layout = wire.Layout({"a": _array(shape, code), "b": _array(shape, code)})
    value = data.draw(hnp.arrays(np.dtype(code), (2, *shape)))
    swapped = value.astype(value.dtype.newbyteorder(">"))
    wide = np.zeros((2, *shape, 2), value.dtype)
    wide[..., 1] = value
    message = layout.pack({"a": swapped, "b": wide[..., 1]})
    assert message == layout.pack({"a": value, "b": value.copy()})
    assert _same(layout.unpack(message, 2)["a"], value)


def test_the_bytes_are_the_ones_of_the_description():
    # Keys sorted: a, then b. Block a: two rows of one int16, 1 and -2, little-endian: 01 00 fe ff,
    # then zeros up to 8. Block b: two rows of two booleans, 4 bytes, zeros up to 8.
    layout = wire.Layout({"b": _array((2,), np.bool_), "a": _array((), np.int16)})
    message = layout.pack(
        {"a": np.array([1, -2], np.int16), "b": np.array([[True, False], [False, True]])}
    )
    assert message == bytes.fromhex("0100feff000000000100000100000000")
    assert layout.nbytes(2) == 16
    assert layout.signature() == [("a", "<i2", ()), ("b", "|b1", (2,))]


def test_blocks_are_in_the_order_of_dm_tree():
    spec = wire.time_step_layout(fakes.OBSERVATION).spec
    paths = ["/".join(map(str, path)) for path, _ in tree.flatten_with_path(spec)]
    signature = wire.time_step_layout(fakes.OBSERVATION).signature()
    assert [path for path, _, _ in signature] == paths
    assert paths[:4] == ["step_type", "reward", "discount", "observation/alive"]


def test_rows_can_be_written_in_place():
    layout = wire.time_step_layout(fakes.OBSERVATION)
    message, arrays = layout.allocate(2)
    steps = fakes.make_time_steps()
    tree.map_structure(np.copyto, arrays, steps)
    assert bytes(message) == layout.pack(steps) == layout.pack(arrays)


def test_unpacked_arrays_are_views_of_the_message():
    layout = wire.Layout(_array((1000,), np.float32))
    message = bytes(layout.nbytes(3))
    view = layout.unpack(message, 3)
    assert np.shares_memory(view, np.frombuffer(message, np.uint8))


def test_named_tuples_keep_their_class():
    Pair = collections.namedtuple("Pair", ["left", "right"])
    layout = wire.Layout(Pair(_array((), np.int8), ()))
    result = layout.unpack(layout.pack(Pair(np.zeros(2, np.int8), ())), 2)
    assert type(result) is Pair
    assert result.right == ()


@settings(max_examples=100, deadline=None)
@given(spec=_specs(), rows=st.integers(0, 3), message=st.binary(max_size=200))
def test_a_message_of_another_size_is_refused_with_both_sizes(spec, rows, message):
    layout = wire.Layout(spec)
    if len(message) == layout.nbytes(rows):
        message += b"x"
    with pytest.raises(
        wire.WireError, match=rf"expected {layout.nbytes(rows)} bytes.*{len(message)}"
    ):
        layout.unpack(message, rows)


def test_a_boolean_is_0_or_1():
    layout = wire.Layout({"alive": _array((2,), np.bool_)})
    with pytest.raises(wire.WireError, match="alive"):
        layout.unpack(b"\x01\x02\0\0\0\0\0\0", 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"a": np.zeros((2, 3), np.float64)},
            r"a: expected float32 \(2, 3\), got float64 \(2, 3\)",
        ),
        (
            {"a": np.zeros((2, 4), np.float32)},
            r"a: expected float32 \(2, 3\), got float32 \(2, 4\)",
        ),
        ({"b": (np.zeros(3, np.int32),)}, r"b/0: expected int32 \(2,\), got int32 \(3,\)"),
        ({"b": ()}, "b: expected 1 parts, got 0"),
        ({"b": np.zeros(2, np.int32)}, "b: expected 1 parts, got ndarray"),
        ({"c": 1}, r"expected a mapping with keys \['a', 'b'\], got \['a', 'b', 'c'\]"),
        ({"a": np.float32(1)}, r"a: expected float32 \(3,\) with rows in front"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_path(change, text):
    layout = wire.Layout({"a": _array((3,), np.float32), "b": (_array((), np.int32),)})
    rows = {"a": np.zeros((2, 3), np.float32), "b": (np.zeros(2, np.int32),)}
    with pytest.raises(wire.WireError, match=text):
        layout.pack({**rows, **change})


@pytest.mark.parametrize("dtype", [object, "S4", "U3", "c8", "M8[s]", "V8", np.longdouble])
def test_only_numbers_and_booleans_are_sent(dtype):
    with pytest.raises(wire.WireError, match=r"observation/x: shape \(2,\): dtype"):
        wire.time_step_layout({"x": _array((2,), dtype)})


def test_what_is_no_array_spec_is_refused_by_path():
    with pytest.raises(wire.WireError, match="action/1: expected an array spec, got str"):
        wire.action_layout((_array((), np.int32), "left"))


def test_the_first_difference_names_path_and_both_sides():
    layout = wire.Layout({"a": _array((3,), np.float32), "b": _array((), np.int32)}, "observation")
    other = lambda **spec: wire.Layout(spec, "observation")
    a, b = _array((3,), np.float32), _array((), np.int32)
    assert layout.difference(other(a=a, b=b)) is None
    assert layout.difference(other(a=_array((4,), np.float32), b=b)) == (
        "observation/a: expected float32 (3,), got float32 (4,)"
    )
    assert layout.difference(other(a=a, b=_array((), np.uint8))) == (
        "observation/b: expected int32 (), got uint8 ()"
    )
    assert layout.difference(other(a=a)) == "observation/b: expected int32 (), got nothing"
    assert layout.difference(other(a=a, b=b, c=b)) == (
        "observation/c: expected nothing, got int32 ()"
    )


def test_specs_differ_in_values_and_bounds_too():
    discrete, bounded = dm_specs.DiscreteArray, dm_specs.BoundedArray
    plain = _array((2,), np.float32)
    low, high = bounded((2,), np.float32, 0, 1), bounded((2,), np.float32, 0, [1, 2])
    assert wire.spec_difference(discrete(4), discrete(4), "action") is None
    assert wire.spec_difference(discrete(4), discrete(6), "action") == (
        "action: expected num_values 4, got 6"
    )
    assert wire.spec_difference({"x": low}, {"x": high}, "action") == (
        "action/x: expected maximum 1.0, got [1. 2.]"
    )
    assert wire.spec_difference(low, plain, "action") is None  # Says nothing about bounds.


def test_the_limit_holds_the_rows_and_a_handshake():
    # One step: 5 MB of pixels and three blocks of 8 bytes for step type, reward and discount.
    pixels = _array((5_000_000,), np.uint8)
    assert wire.message_limit(pixels, dm_specs.DiscreteArray(2), 1) == 5_000_024 + 2**20


def test_a_pickle_is_only_bytes(tmp_path):
    marker = tmp_path / "marker"
    layout = wire.Layout(_array((8,), np.uint8))
    evil = pickle.dumps(_Evil(str(marker)))
    evil += bytes(-len(evil) % 8)
    layout.unpack(evil, len(evil) // 8)
    assert not marker.exists()


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_time_step_is_packed_as_such():
    layout = wire.time_step_layout(fakes.OBSERVATION)
    result = layout.unpack(layout.pack(fakes.make_time_steps()), 2)
    assert isinstance(result, dm_env.TimeStep)
    tree.map_structure(np.testing.assert_array_equal, result, fakes.make_time_steps())
