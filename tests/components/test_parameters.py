"""Tests of the parameter store: whole versions, the newest, on the right device."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedlib.components import parameters
from tests.components import harness

DEVICE = jax.local_devices()[0]


def test_nothing_is_there_before_the_first_version():
    store = parameters.ParameterStore([DEVICE])
    with pytest.raises(TimeoutError, match="no parameters were published within"):
        store.get(DEVICE, 0.01)


def test_the_first_version_wakes_who_waits():
    store = parameters.ParameterStore([DEVICE])
    reader = harness.Call(store.get, DEVICE)
    store.publish(3, {"w": jnp.ones(2)})
    version, params = reader.result()
    assert version == 3
    assert params["w"].devices() == {DEVICE}


def test_the_newest_version_is_returned():
    store = parameters.ParameterStore([DEVICE])
    for version in (1, 2, 2**40):
        store.publish(version, harness.version_params(7))
    assert store.get(DEVICE).version == 2**40


def test_another_device_is_refused():
    store = parameters.ParameterStore([])
    with pytest.raises(KeyError, match="no parameters are kept on"):
        store.get(DEVICE)


def test_parameters_of_a_mesh_come_as_those_of_one_device():
    mesh = jax.sharding.Mesh(np.array([DEVICE]), ("batch",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    store = parameters.ParameterStore([DEVICE])
    store.publish(1, {"w": jax.device_put(jnp.arange(3.0), replicated)})
    (leaf,) = jax.tree.leaves(store.get(DEVICE).params)
    assert leaf.sharding == jax.sharding.SingleDeviceSharding(DEVICE)
    np.testing.assert_array_equal(leaf, [0, 1, 2])


def test_a_reader_never_sees_parts_of_two_versions():
    store = parameters.ParameterStore([DEVICE])
    store.publish(0, harness.version_params(0))
    done = threading.Event()

    def publish():
        for version in range(1, 200):
            store.publish(version, harness.version_params(version))
        done.set()

    def read():
        seen = []
        while not done.is_set():
            version, params = store.get(DEVICE)
            for leaf in jax.tree.leaves(params):
                assert np.all(np.asarray(leaf) == version)
            seen.append(version)
        return seen

    _, seen = harness.together([publish, read])
    assert seen == sorted(seen)
