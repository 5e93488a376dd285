"""The small leaves of a step side by side in one record of bytes, so that they move as one.

A leaf that moves by itself costs a transfer from the device, a call to scatter it and another to
gather it; and in a process of several threads each of these calls may have to wait for the
interpreter lock. A step has a dozen leaves, of which all but images are a few bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tree

from seedlib import types

_WORD = 8  # Records are whole words, so that every leaf in an array of them is aligned.


class Records(NamedTuple):
    """Some steps, packed.

    Attributes:
      small: uint8 `[n, W]`, a record of each step.
      large: the leaves that are in no record, in the order of leaves, each `[n, ...]`.
    """

    small: Any
    large: tuple[Any, ...]


class RecordLayout:
    """Which leaf lies where in a record."""

    def __init__(self, spec: types.Nested, largest: int = 1024) -> None:
        """Lays out the leaves.

        Args:
          spec: nested leaves with `shape` and `dtype`: one step.
          largest: bytes of a leaf; one with more stays outside of the record.
        """
        self.spec = spec
        self._leaves = [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in tree.flatten(spec)]
        self._sizes = [
            dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for shape, dtype in self._leaves
        ]
        offset = 0
        fields: dict[str, tuple[Any, int]] = {}
        self._places: list[int | None] = []
        for number, (shape, dtype) in enumerate(self._leaves):
            size = self._sizes[number]
            if size > largest:
                self._places.append(None)
                continue
            offset = -(-offset // dtype.itemsize) * dtype.itemsize
            fields[str(number)] = ((dtype, shape), offset)
            self._places.append(offset)
            offset += size
        self.itemsize = max(_WORD, -(-offset // _WORD) * _WORD)
        self._fields = np.dtype(
            {
                "names": list(fields),
                "formats": [form for form, _ in fields.values()],
                "offsets": [at for _, at in fields.values()],
                "itemsize": self.itemsize,
            }
        )
        # An array of these is scattered and gathered record by record, whatever the fields are.
        self.dtype = np.dtype((np.void, self.itemsize))

    @property
    def large(self) -> tuple[int, ...]:
        """The numbers, in the order of leaves, of those that are in no record."""
        return tuple(number for number, place in enumerate(self._places) if place is None)

    @property
    def large_specs(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of these."""
        return tuple(self._leaves[number] for number in self.large)

    def pack(self, steps: types.Nested) -> Records:
        """Packs steps on a device; for use inside a jitted function.

        Args:
          steps: leaves `[n, ...]` of as many bytes a row as the spec says: a number of 64 bits,
            which JAX has not, may be given as two of 32, the lower one first.

        Raises:
          ValueError: a leaf has rows of another size.
        """
        leaves = tree.flatten(steps)
        count = leaves[0].shape[0]
        parts: list[jax.Array] = []
        end = 0
        for leaf, place, size, (shape, dtype) in zip(
            leaves, self._places, self._sizes, self._leaves, strict=True
        ):
            if place is None:
                continue
            if place > end:
                parts.append(jnp.zeros((count, place - end), jnp.uint8))
            row = _bytes(leaf).reshape(count, -1)
            if row.shape[1] != size:
                raise ValueError(f"expected rows of {dtype} {shape}, got {leaf.dtype} {leaf.shape}")
            parts.append(row)
            end = place + size
        if self.itemsize > end:
            parts.append(jnp.zeros((count, self.itemsize - end), jnp.uint8))
        return Records(jnp.concatenate(parts, axis=1), tuple(leaves[n] for n in self.large))

    def pack_rows(self, steps: types.Nested) -> Records:
        """Packs steps on the host: leaves `[n, ...]`, cast to the spec's dtypes."""
        leaves = tree.flatten(steps)
        records = np.zeros(len(leaves[0]), self._fields)
        for name in self._fields.names or ():
            records[name] = leaves[int(name)]
        return Records(
            records.view(np.uint8).reshape(len(records), self.itemsize),
            tuple(leaves[n] for n in self.large),
        )

    def unpack(self, records: np.ndarray, large: tuple[np.ndarray, ...]) -> types.Nested:
        """Returns the leaves; small ones are views.

        Args:
          records: of `dtype`, any shape, contiguous.
          large: the other leaves, with the same leading shape.
        """
        fields = records.view(self._fields)
        others = iter(large)
        return tree.unflatten_as(
            self.spec,
            [
                next(others) if place is None else fields[str(number)]
                for number, place in enumerate(self._places)
            ],
        )


def _bytes(leaf: jax.Array) -> jax.Array:
    """Returns an array's bytes, as they lie in the memory of a little-endian host."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8)
