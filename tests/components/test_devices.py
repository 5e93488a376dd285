"""Tests of splitting devices: the function never looks into one, so letters stand for them."""

import jax
import pytest

from seedlib.components import devices


def split(names, count=None):
    result = devices.split_devices(count, tuple(names))
    return "".join(result.inference), "".join(result.training)


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        ("a", None, ("a", "a")),
        ("a", 0, ("a", "a")),
        ("a", 1, ("a", "a")),
        ("ab", None, ("a", "b")),
        ("abcd", None, ("a", "bcd")),
        ("abcdefgh", None, ("ab", "cdefgh")),  # SEED's split of eight TPU cores.
        ("abcd", 0, ("abcd", "abcd")),
        ("abcd", 3, ("abc", "d")),
    ],
)
def test_a_quarter_infers_or_as_many_as_asked_for(names, count, expected):
    assert split(names, count) == expected


@pytest.mark.parametrize(("names", "count"), [("a", 2), ("abcd", 4), ("abcd", 5), ("abcd", -1)])
def test_a_split_that_leaves_nobody_to_train_is_refused(names, count):
    with pytest.raises(ValueError, match=rf"inference_devices must be in 0\.\..* got {count}"):
        split(names, count)


def test_a_batch_that_cannot_be_shared_evenly_is_refused():
    result = devices.split_devices(1, tuple("abcd"))
    result.check_batch_size(6)
    with pytest.raises(ValueError, match="batch_size 8 cannot be divided among 3 training"):
        result.check_batch_size(8)


def test_the_mesh_is_of_the_training_devices():
    result = devices.split_devices()
    assert result.inference == tuple(jax.local_devices())[: len(result.inference)]
    assert list(result.mesh().devices) == list(result.training)
    assert result.mesh().axis_names == (devices.BATCH_AXIS,)
