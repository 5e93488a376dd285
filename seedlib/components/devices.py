"""Which local devices infer and which train, and the mesh of the latter."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

BATCH_AXIS = "batch"
"""The mesh axis over which a batch of unrolls is split."""


def compute_in_calling_threads() -> None:
    """Lets CPU devices compute in the thread that asks. Before this process's first computation.

    JAX hands a CPU's computations to threads of its own, which gains nothing where the caller waits
    for the result, and costs two wake-ups a call; a donated buffer is even waited for with its
    successor in hand. Seen with a small network: a call takes half the time, or a third while
    another thread trains. Accelerators are not concerned.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """The devices of one host by their work.

    Attributes:
      inference: devices that run the policy.
      training: devices that share each update's batch. May be the same ones.
    """

    inference: tuple[jax.Device, ...]
    training: tuple[jax.Device, ...]

    def mesh(self) -> jax.sharding.Mesh:
        """Returns the one-axis mesh of the training devices."""
        return jax.sharding.Mesh(np.array(self.training), (BATCH_AXIS,))

    def check_batch_size(self, batch_size: int) -> None:
        """Refuses a batch that the training devices cannot share evenly.

        Raises:
          ValueError: naming both numbers.
        """
        if batch_size % len(self.training):
            raise ValueError(
                f"batch_size {batch_size} cannot be divided among {len(self.training)} training "
                "devices"
            )


def split_devices(
    inference_devices: int | None = None, devices: Sequence[jax.Device] | None = None
) -> DeviceSplit:
    """Splits devices into inferring and training ones.

    Args:
      inference_devices: how many infer. None takes a quarter of them (SEED's 2 of 8 TPU cores), at
        least one; 0 shares all devices between both.
      devices: which; None takes this host's.

    Returns:
      The split. With one device both share it.

    Raises:
      ValueError: where no device would be left to train.
    """
    local = tuple(jax.local_devices() if devices is None else devices)
    if len(local) == 1 and inference_devices in (None, 0, 1):
        return DeviceSplit(local, local)
    if inference_devices == 0:
        return DeviceSplit(local, local)
    count = max(1, len(local) // 4) if inference_devices is None else inference_devices
    if not 0 < count < len(local):
        raise ValueError(
            f"inference_devices must be in 0..{max(len(local) - 1, 1)} with {len(local)} local "
            f"devices, got {inference_devices}"
        )
    return DeviceSplit(local[:count], local[count:])
