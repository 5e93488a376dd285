"""One atomic checkpoint of everything that a run needs to go on.

A checkpoint is a directory `<directory>/<updates>` that holds the training state (arrays, by orbax)
and the counters (JSON). Orbax writes it under a temporary name and renames it when it is whole, so
that a crash in the middle leaves the one before it as the newest.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class CheckpointError(Exception):
    """A checkpoint that does not fit this run, or cannot be written."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is saved together.

    Attributes:
      state: nested arrays.
      counters: JSON values by name; integers of any size.
    """

    state: Any
    counters: dict[str, Any]


class Checkpointer:
    """Saves and restores checkpoints of one run. Owned by one thread."""

    def __init__(self, directory: str | pathlib.Path, keep: int = 3) -> None:
        """Opens a directory, made where it is missing.

        Args:
          directory: where checkpoints lie.
          keep: how many of the newest are kept.
        """
        self._directory = pathlib.Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "counters": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                # What a crash in the middle of a save left behind.
                cleanup_tmp_directories=True,
                # Saving beside training would need a copy that no donated buffer shares.
                enable_async_checkpointing=False,
            ),
        )

    def latest(self) -> int | None:
        """Returns the number of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, number: int, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; returns when it is whole.

        Args:
          number: its name: the learner's updates. One that is there already is left as it is.
          checkpoint: what to write.

        Raises:
          CheckpointError: it could not be written; older ones are intact.
        """
        if number in self._manager.all_steps():
            return
        try:
            self._manager.save(
                number,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(checkpoint.state),
                    counters=ocp.args.JsonSave(checkpoint.counters),
                ),
                force=True,
            )
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            # A full disk is an OSError to Python and one of the others to the array storage.
            raise CheckpointError(f"{self._directory}/{number}: {_first_line(error)}") from error

    def restore(self, like: Any) -> Checkpoint | None:
        """Reads the newest whole checkpoint.

        Args:
          like: nested arrays of the state's structure, shapes and dtypes.

        Returns:
          The checkpoint, with arrays on the host; None where there is none.

        Raises:
          CheckpointError: it has another structure than `like`.
        """
        number = self.latest()
        if number is None:
            return None
        where = f"{self._directory}/{number}"
        target = jax.tree_util.tree_map(
            lambda leaf: np.zeros(np.shape(leaf), np.asarray(leaf).dtype), like
        )
        try:
            # Orbax casts other dtypes and lets other shapes pass, so the comparison is made here.
            theirs = _describe(self._manager.item_metadata(number).state.tree)
            ours = _describe(target)
            for leaf in sorted(ours.keys() | theirs.keys()):
                if ours.get(leaf) != theirs.get(leaf):
                    raise CheckpointError(
                        f"{where} does not fit this agent's training state: {leaf} is "
                        f"{theirs.get(leaf, 'missing')} there, {ours.get(leaf, 'missing')} here"
                    )
            restored = self._manager.restore(
                number,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(target), counters=ocp.args.JsonRestore()
                ),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} cannot be read: {_first_line(error)}") from error
        return Checkpoint(restored["state"], dict(restored["counters"]))

    def close(self) -> None:
        """Frees what orbax holds."""
        self._manager.close()


def _describe(state: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf as text, by the leaf's dotted name."""
    return {
        # A named tuple lies in a checkpoint as a dict, so only the names of the keys count.
        jax.tree_util.keystr(path, simple=True, separator="."): (
            f"{leaf.dtype} {tuple(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
