"""Records: what the device packs is what the host would, and comes back as it was."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs
from hypothesis import strategies

from seedlib.components import records

DTYPES = (np.uint8, np.int8, np.bool_, np.int16, np.int32, np.uint32, np.float16, np.float32)
LEAVES = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(DTYPES),
        strategies.lists(strategies.integers(1, 3), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=6,
)


def random_bits(random, shape, dtype):
    """Any bits at all, also those of numbers that are none."""
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return random.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(LEAVES, strategies.integers(0, 2**32 - 1), strategies.sampled_from([4, 1024]))
def test_what_a_device_packs_comes_back_bit_by_bit(leaves, seed, largest):
    spec = {str(n): dm_specs.Array(shape, dtype) for n, (dtype, shape) in enumerate(leaves)}
    random = np.random.default_rng(seed)
    steps = {
        str(n): random_bits(random, (5, *shape), dtype) for n, (dtype, shape) in enumerate(leaves)
    }
    layout = records.RecordLayout(spec, largest)
    packed = jax.jit(layout.pack)(steps)
    on_host = layout.pack_rows(steps)
    same_bits(np.asarray(packed.small), on_host.small)
    back = layout.unpack(
        np.asarray(packed.small).view(layout.dtype)[:, 0],
        tuple(np.asarray(leaf) for leaf in packed.large),
    )
    tree.map_structure(same_bits, back, steps)


def test_numbers_of_64_bits_are_packed_from_their_halves():
    layout = records.RecordLayout({"a": dm_specs.Array((), np.uint8), "b": dm_specs.Array((), int)})
    number = np.array([2**40 + 7, -3])
    halves = jnp.array([[7, 2**8], [-3, -1]], jnp.int32)
    packed = layout.pack({"a": jnp.array([1, 2], jnp.uint8), "b": halves})
    back = layout.unpack(np.asarray(packed.small).view(layout.dtype)[:, 0], ())
    np.testing.assert_array_equal(back["b"], number)
    np.testing.assert_array_equal(back["a"], [1, 2])


def test_records_may_have_any_leading_shape():
    layout = records.RecordLayout((dm_specs.Array((2,), np.float32), dm_specs.Array((), bool)))
    rows = layout.pack_rows((np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) > 2))
    block = rows.small.view(layout.dtype).reshape(2, 3)
    numbers, flags = layout.unpack(block, ())
    assert numbers.shape == (2, 3, 2)
    assert numbers[1, 0].tolist() == [6.0, 7.0]
    assert flags.tolist() == [[False, False, False], [True, True, True]]


def test_every_leaf_lies_aligned():
    spec = [dm_specs.Array((), d) for d in (bool, np.float32, bool, np.int64, np.uint8, np.int16)]
    layout = records.RecordLayout(spec)
    fields = layout.unpack(np.zeros((3, 4), layout.dtype), ())
    for field in fields:
        address = field.__array_interface__["data"][0]
        assert address % field.dtype.itemsize == 0
        assert all(stride % field.dtype.itemsize == 0 for stride in field.strides)


def test_only_large_leaves_stay_outside():
    layout = records.RecordLayout(
        {"image": dm_specs.Array((33, 32), np.uint8), "row": dm_specs.Array((32, 32), np.uint8)}
    )
    assert layout.large == (0,)
    assert layout.large_specs == (((33, 32), np.dtype(np.uint8)),)
    assert layout.itemsize == 1024


def test_rows_of_another_size_are_refused():
    layout = records.RecordLayout({"a": dm_specs.Array((2,), np.float32)})
    with pytest.raises(ValueError, match=r"expected rows of float32 \(2,\), got float32 \(4, 3\)"):
        layout.pack({"a": jnp.zeros((4, 3))})
