"""Versioned policy parameters: published whole by a learner, read whole by inference."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax


class VersionedParameters(NamedTuple):
    """Parameters and the learner update that they came from.

    Attributes:
      version: the learner's update count, 64 bit.
      params: what `Policy.step` takes.
    """

    version: int
    params: Any


class ParameterSource(Protocol):
    """Where inference gets its parameters from, beside the learner or across a network."""

    def get(self, device: jax.Device, timeout: float | None = None) -> VersionedParameters:
        """Returns the newest whole version, on `device`.

        Args:
          device: where the parameters shall lie.
          timeout: seconds to wait for a first version; None waits without limit.

        Raises:
          TimeoutError: there is no version within `timeout`.
        """
        ...


def _put(leaf: jax.Array, device: jax.Device) -> jax.Array:
    """Returns a replicated array as one on `device`; without a copy where it lies there already.

    `jax.device_put` of a replicated array costs some 40 microseconds even where there is nothing
    to move: more than a small network's update.
    """
    # An array that is bound to no device would count as another type, and be compiled for again.
    shards = leaf.addressable_shards if getattr(leaf, "committed", False) else ()
    for shard in shards:
        if shard.device == device and shard.data.shape == leaf.shape:
            return shard.data
    return jax.device_put(leaf, device)


class ParameterStore:
    """Hands parameters from the learner to inference in one process, device to device.

    A reader sees an old version or a new one, never parts of both: a version is copied to every
    device first, and one reference is swapped after that.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Starts empty, for inference on `devices`."""
        self._devices = tuple(devices)
        self._condition = threading.Condition()
        self._versions: dict[jax.Device, VersionedParameters] = {}

    def publish(self, version: int, params: Any) -> None:
        """Makes a version the newest.

        Args:
          version: the learner's update count.
          params: nested JAX arrays that nobody donates later (a donated buffer is deleted under
            its readers); replicated over the learner's mesh, or on one device.
        """
        versions = {
            device: VersionedParameters(
                version, jax.tree_util.tree_map(lambda leaf, on=device: _put(leaf, on), params)
            )
            for device in self._devices
        }
        with self._condition:
            self._versions = versions
            self._condition.notify_all()

    def get(self, device: jax.Device, timeout: float | None = None) -> VersionedParameters:
        """See `ParameterSource.get`.

        Raises:
          KeyError: `device` is none of the store's.
        """
        if device not in self._devices:
            raise KeyError(f"no parameters are kept on {device}; devices: {self._devices}")
        versions = self._versions
        if not versions:
            with self._condition:
                if not self._condition.wait_for(lambda: bool(self._versions), timeout):
                    raise TimeoutError(f"no parameters were published within {timeout} s")
                versions = self._versions
        return versions[device]
