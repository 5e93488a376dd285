"""How rows of nested arrays lie in a message: one block per leaf, no framing and no pickle.

A message of `rows` rows is, for each leaf of the spec in dm-tree's order (the keys of a mapping are
sorted), one contiguous little-endian block `[rows, *shape]`, padded with zeros to a multiple of
8 bytes. Both ends know the layout from the handshake, so a message holds nothing but numbers.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import dm_env
import numpy as np
from dm_env import specs as dm_specs

from seedlib import types

ALIGNMENT = 8
"""Blocks begin at multiples of this, so that every dtype on the wire is aligned."""

MESSAGE_HEADROOM = 1 << 20
"""Bytes of a message limit beyond the rows: a handshake must fit where the rows are tiny."""

_PADDING = tuple(bytes(size) for size in range(ALIGNMENT))
_MAX_ITEM_SIZE = 8  # Wider floats differ from platform to platform.


class WireError(ValueError):
    """Bytes, arrays or specs that do not fit a layout; the message names path, dtype and shape."""


class Leaf(NamedTuple):
    """One array of a row.

    Attributes:
      path: where it lies in the nested structure, for example `observation/pixels`.
      dtype: little-endian.
      shape: of one row.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns the form that error messages use."""
        return f"{self.dtype.name} {self.shape}"


class _Node(NamedTuple):
    """A part of the structure: a leaf where `kind` is None, else a container and its children."""

    kind: type | None
    keys: tuple[str, ...]
    children: tuple["_Node", ...]


class _Block(NamedTuple):
    """Where a leaf lies in a message of a known number of rows."""

    leaf: Leaf
    shape: tuple[int, ...]  # [rows, *leaf.shape]
    offset: int
    padding: bytes


class _Plan(NamedTuple):
    rows: int
    nbytes: int
    blocks: tuple[_Block, ...]


def is_namedtuple(value: Any) -> bool:
    """Returns whether `value` is an instance of a named tuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def wire_dtype(dtype: Any) -> np.dtype:
    """Returns `dtype` as it is sent: little-endian.

    Raises:
      WireError: where it is neither numeric nor boolean, or wider than 64 bit.
    """
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > _MAX_ITEM_SIZE:
        raise WireError(f"dtype {dtype} cannot be sent: numbers of at most 64 bit and bool can")
    return dtype.newbyteorder("<")


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


class Layout:
    """The packed bytes of rows of a nested structure. Immutable; may be shared by threads."""

    def __init__(self, spec: types.Nested, name: str = ""):
        """Lays out `spec`.

        Args:
          spec: dicts, tuples, lists and named tuples of leaves with `shape` and `dtype` (of one
            row), for example nested `dm_env.specs.Array`.
          name: what to put in front of every path.

        Raises:
          WireError: where a leaf is no array spec, or its dtype cannot be sent.
        """
        leaves: list[Leaf] = []
        self._root = _compile(spec, name, leaves)
        self._leaves = tuple(leaves)
        # A session keeps its number of rows, so the last plan is nearly always the wanted one.
        self._last_plan = self._make_plan(1)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves, in the order of their blocks."""
        return self._leaves

    @property
    def spec(self) -> types.Nested:
        """The structure with a plain `dm_env.specs.Array` for each leaf."""
        return self._build([dm_specs.Array(leaf.shape, leaf.dtype) for leaf in self._leaves])

    def signature(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Returns path, dtype (as `numpy.dtype.str`) and shape of each leaf, in order."""
        return [(leaf.path, leaf.dtype.str, leaf.shape) for leaf in self._leaves]

    def difference(self, other: "Layout") -> str | None:
        """Returns the first difference as a line, or None where messages are the same.

        Args:
          other: the layout that was given; this one is the expected one.
        """
        mine = {leaf.path: leaf for leaf in self._leaves}
        given = {leaf.path: leaf for leaf in other.leaves}
        for path, leaf in mine.items():
            if path not in given:
                return f"{path}: expected {leaf}, got nothing"
            if leaf != given[path]:
                return f"{path}: expected {leaf}, got {given[path]}"
        for path, leaf in given.items():
            if path not in mine:
                return f"{path}: expected nothing, got {leaf}"
        return None

    def nbytes(self, rows: int) -> int:
        """Returns the exact size of a message of `rows` rows, in bytes."""
        return self._plan(rows).nbytes

    def allocate(self, rows: int) -> tuple[bytearray, types.Nested]:
        """Returns a zeroed message and writable arrays into it, leaves `[rows, *shape]`.

        `bytes(message)` is what `pack(arrays)` returns.
        """
        plan = self._plan(rows)
        message = bytearray(plan.nbytes)
        return message, self._build(self._views(message, plan))

    def pack(self, nested: types.Nested) -> bytes:
        """Returns the message that holds `nested`.

        Each contiguous little-endian array is copied once, straight into the message.

        Args:
          nested: arrays `[rows, *shape]` of the leaves' dtypes (any byte order, any strides) in
            the structure of the spec; a named tuple and a tuple may stand for each other.

        Raises:
          WireError: where structure, dtype, shape or the number of rows differ.
        """
        values: list[Any] = []
        _flatten(self._root, nested, "", values)
        if not values:
            return b""
        first = np.shape(values[0])
        if len(first) == 0:
            leaf = self._leaves[0]
            raise WireError(f"{leaf.path}: expected {leaf} with rows in front, got shape ()")
        parts: list[Any] = []
        for block, value in zip(self._plan(first[0]).blocks, values, strict=True):
            array = np.asarray(value)
            dtype = block.leaf.dtype
            if array.dtype != dtype and array.dtype.newbyteorder("<") != dtype:
                raise _misfit(block, array)
            if array.shape != block.shape:
                raise _misfit(block, array)
            # Copies only where byte order or strides ask for it.
            parts.append(np.ascontiguousarray(array, dtype))
            parts.append(block.padding)
        return b"".join(parts)

    def unpack(self, message: bytes | bytearray | memoryview, rows: int) -> types.Nested:
        """Returns read-only views into `message`, leaves `[rows, *shape]`; nothing is copied.

        Raises:
          WireError: where the size is not that of `rows` rows, or a boolean is neither 0 nor 1.
        """
        plan = self._plan(rows)
        if len(message) != plan.nbytes:
            raise WireError(
                f"expected {plan.nbytes} bytes ({rows} rows of {self._summary()}), "
                f"got {len(message)} bytes"
            )
        views = self._views(message, plan)
        for leaf, view in zip(self._leaves, views, strict=True):
            view.flags.writeable = False
            # NumPy's results for other bytes in a bool array are undefined.
            if leaf.dtype.kind == "b" and view.size and view.view(np.uint8).max() > 1:
                raise WireError(f"{leaf.path}: expected bool {leaf.shape}, got a byte above 1")
        return self._build(views)

    def _plan(self, rows: int) -> _Plan:
        plan = self._last_plan
        if plan.rows != rows:
            plan = self._last_plan = self._make_plan(rows)
        return plan

    def _make_plan(self, rows: int) -> _Plan:
        if rows < 0:
            raise WireError(f"rows must not be negative, got {rows}")
        blocks, offset = [], 0
        for leaf in self._leaves:
            size = rows * math.prod(leaf.shape) * leaf.dtype.itemsize
            padding = _PADDING[-size % ALIGNMENT]
            blocks.append(_Block(leaf, (rows, *leaf.shape), offset, padding))
            offset += size + len(padding)
        return _Plan(rows, offset, tuple(blocks))

    def _views(self, message: bytes | bytearray | memoryview, plan: _Plan) -> list[np.ndarray]:
        return [
            np.ndarray(block.shape, block.leaf.dtype, message, block.offset)
            for block in plan.blocks
        ]

    def _build(self, leaves: list[Any]) -> types.Nested:
        return _build(self._root, iter(leaves))

    def _summary(self) -> str:
        shown = ", ".join(f"{leaf.path} {leaf}" for leaf in self._leaves[:8])
        return shown + (", ..." if len(self._leaves) > 8 else "")


def time_step_layout(observation_spec: types.Nested) -> Layout:
    """Returns the layout of a request: one `dm_env.TimeStep` per row."""
    return Layout(
        dm_env.TimeStep(
            step_type=dm_specs.Array((), np.uint8),
            reward=dm_specs.Array((), np.float32),
            discount=dm_specs.Array((), np.float32),
            observation=observation_spec,
        )
    )


def action_layout(action_spec: types.Nested) -> Layout:
    """Returns the layout of an answer: one action per row."""
    return Layout(action_spec, "action")


def message_limit(
    observation_spec: types.Nested, action_spec: types.Nested, environments: int
) -> int:
    """Returns a message limit in bytes for actors of at most `environments` environments each.

    Server and clients take it as their `max_message_bytes`: the larger of request and answer, and
    headroom for the handshake.
    """
    request = time_step_layout(observation_spec).nbytes(environments)
    answer = action_layout(action_spec).nbytes(environments)
    return max(request, answer) + MESSAGE_HEADROOM


def spec_difference(expected: types.Nested, given: types.Nested, name: str) -> str | None:
    """Returns the first difference of two specs as a line that names the path, or None.

    Dtypes and shapes are compared first, then `num_values`, then bounds. A leaf without bounds
    says nothing about them, so they are compared where both sides have some.

    Args:
      expected: nested `dm_env.specs.Array`.
      given: nested `dm_env.specs.Array`.
      name: what to put in front of every path.

    Raises:
      WireError: where a leaf cannot be sent.
    """
    expected_layout, given_layout = Layout(expected, name), Layout(given, name)
    difference = expected_layout.difference(given_layout)
    if difference is not None:
        return difference
    expected_leaves: list[Any] = []
    given_leaves: list[Any] = []
    _collect(expected, expected_leaves)
    _collect(given, given_leaves)
    for leaf, want, have in zip(expected_layout.leaves, expected_leaves, given_leaves, strict=True):
        for attribute in ("num_values", "minimum", "maximum"):
            wanted, had = getattr(want, attribute, None), getattr(have, attribute, None)
            if wanted is None or had is None:
                continue
            if not np.all(np.equal(wanted, had)):
                return f"{leaf.path}: expected {attribute} {wanted}, got {had}"
    return None


def _compile(spec: Any, path: str, leaves: list[Leaf]) -> _Node:
    """Returns the structure of `spec`, and appends its leaves in dm-tree's order."""
    if isinstance(spec, Mapping):
        if not all(isinstance(key, str) for key in spec):
            raise WireError(f"{path or 'spec'}: keys must be text, got {list(spec)[:8]}")
        keys = tuple(sorted(spec))
        return _Node(dict, keys, tuple(_compile(spec[k], _join(path, k), leaves) for k in keys))
    if is_namedtuple(spec):
        keys = tuple(spec._fields)
        parts = zip(keys, spec, strict=True)
        children = tuple(_compile(part, _join(path, key), leaves) for key, part in parts)
        return _Node(type(spec), keys, children)
    if isinstance(spec, tuple | list):
        children = tuple(_compile(part, _join(path, i), leaves) for i, part in enumerate(spec))
        return _Node(list if isinstance(spec, list) else tuple, (), children)
    if not (hasattr(spec, "shape") and hasattr(spec, "dtype")):
        raise WireError(f"{path or 'spec'}: expected an array spec, got {type(spec).__name__}")
    shape = tuple(int(size) for size in spec.shape)
    try:
        dtype = wire_dtype(spec.dtype)
    except WireError as error:
        raise WireError(f"{path or 'spec'}: shape {shape}: {error}") from None
    leaves.append(Leaf(path, dtype, shape))
    return _Node(None, (), ())


def _flatten(node: _Node, value: Any, path: str, values: list[Any]) -> None:
    """Appends the leaves of `value`, which must have the structure of `node`."""
    if node.kind is None:
        values.append(value)
    elif node.kind is dict:
        if not isinstance(value, Mapping) or len(value) != len(node.keys):
            raise _other_structure(node, value, path)
        for key, child in zip(node.keys, node.children, strict=True):
            if key not in value:
                raise _other_structure(node, value, path)
            _flatten(child, value[key], _join(path, key), values)
    else:
        if not isinstance(value, tuple | list) or len(value) != len(node.children):
            raise _other_structure(node, value, path)
        for index, child in enumerate(node.children):
            name = node.keys[index] if node.keys else index
            _flatten(child, value[index], _join(path, name), values)


def _build(node: _Node, leaves: Iterator[Any]) -> Any:
    """Returns the structure of `node` with the next of `leaves` in it."""
    if node.kind is None:
        return next(leaves)
    parts = [_build(child, leaves) for child in node.children]
    if node.kind is dict:
        return dict(zip(node.keys, parts, strict=True))
    return node.kind(parts) if node.kind in (tuple, list) else node.kind(*parts)


def _collect(spec: Any, leaves: list[Any]) -> None:
    """Appends the leaves of a spec that `_compile` has accepted, in the same order."""
    if isinstance(spec, Mapping):
        for key in sorted(spec):
            _collect(spec[key], leaves)
    elif isinstance(spec, tuple | list):
        for part in spec:
            _collect(part, leaves)
    else:
        leaves.append(spec)


def _other_structure(node: _Node, value: Any, path: str) -> WireError:
    if node.kind is dict:
        wanted = f"a mapping with keys {list(node.keys)}"
        had = list(value) if isinstance(value, Mapping) else type(value).__name__
    else:
        wanted = f"{len(node.children)} parts"
        had = f"{len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    return WireError(f"{path or 'rows'}: expected {wanted}, got {had}")


def _misfit(block: _Block, array: np.ndarray) -> WireError:
    return WireError(
        f"{block.leaf.path or 'rows'}: expected {block.leaf.dtype.name} {block.shape}, "
        f"got {array.dtype} {array.shape}"
    )
