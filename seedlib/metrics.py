"""A logger that writes the figures of a run as CSV and as TensorBoard events.

It is an Acme logger, made of Acme's where they fit: its dispatcher and its `tf.summary` writer. The
CSV is our own, because Acme's drops columns that the first row lacks and is not made to be resumed.
"""

import csv
import io
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np
from absl import logging
from acme.utils.loggers import aggregators, base

from seedlib import run_directory

TENSORBOARD = "tensorboard"
"""The folder of a run's directory that holds its TensorBoard events."""


class CsvLogger(base.Logger):
    """Appends rows to a CSV file. New columns widen the file, and a resumed run appends to it.

    A value that a row lacks is an empty cell. Every row is handed to the operating system before
    `write` returns, so a killed process loses none. One writer per file; threads may share it.
    """

    def __init__(self, path: str) -> None:
        """Opens or creates the file.

        Args:
          path: the file; a half row at its end, left by a crash of the host, is cut off (and
            logged).
        """
        self._path = path
        self._lock = threading.Lock()
        self._columns = self._mend()
        self._file = self._open()

    def write(self, data: Mapping[str, Any]) -> None:
        """Appends one row.

        Raises:
          ValueError: after `close`.
        """
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self._path}: write after close")
            fresh = [key for key in data if key not in self._columns]
            if fresh:
                self._widen(fresh)
            row = ["" if data.get(key) is None else data[key] for key in self._columns]
            self._file.write(_csv_line(row))
            self._file.flush()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        with self._lock:
            self._file.close()

    def _mend(self) -> list[str]:
        """Cuts off a half row at the end of the file; returns the columns that it has."""
        try:
            with open(self._path, encoding="utf-8", newline="") as file:
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            logging.warning("%s: cut off a half row at the end: %r", self._path, text[len(whole) :])
            run_directory.write_atomically(self._path, whole, durable=True)
        return next(csv.reader(io.StringIO(whole)), [])

    def _widen(self, fresh: list[str]) -> None:
        """Adds columns at the right; the rows so far get empty cells."""
        with open(self._path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        columns = self._columns + fresh
        lines = [columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]
        # The whole file is written anew, which is dear only if columns kept coming; they do not.
        run_directory.write_atomically(self._path, "".join(map(_csv_line, lines)), durable=True)
        self._columns = columns
        self._file.close()
        self._file = self._open()

    def _open(self) -> TextIO:
        """Opens the file for appending; the logger closes it."""
        return open(self._path, "a", encoding="utf-8", newline="")


class MetricsLogger(base.Logger):
    """Writes rows of figures to `<label>.csv` and to TensorBoard events. Threads may share it.

    An error in writing (a full disk, say) is raised by `write`, in the thread that called it.
    """

    def __init__(
        self,
        directory: run_directory.RunDirectory,
        label: str,
        steps_key: str = "agent_steps",
        tensorboard: bool = True,
    ) -> None:
        """Opens the files.

        Args:
          directory: the run's; prepared.
          label: name of the CSV, and the group of the figures in TensorBoard.
          steps_key: the figure of a row that is TensorBoard's step; every row must have it.
          tensorboard: whether to write events. This imports TensorFlow, which takes seconds and
            some 400 MB where no other part of the process has done so.

        Raises:
          ValueError: where `label` cannot name a file.
        """
        if not label or os.path.basename(label) != label:
            raise ValueError(f"label must be a plain file name, got {label!r}")
        self._steps_key = steps_key
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._closed = False
        writers: list[base.Logger] = [CsvLogger(directory.file(f"{label}.csv"))]
        if tensorboard:
            writers.append(_EventLogger(directory.file(TENSORBOARD), label, steps_key))
        self._to = aggregators.Dispatcher(writers)

    def write(self, data: Mapping[str, Any]) -> None:
        """Writes one row.

        Args:
          data: figures by name: Python, NumPy or JAX scalars; None where one is not known yet.
            `wall_seconds`, seconds since this logger was made, is added where the row has none.

        Raises:
          ValueError: where the row lacks `steps_key`, or after `close`.
          TypeError: where a figure is not a scalar, naming it.
        """
        if data.get(self._steps_key) is None:
            raise ValueError(f"a row needs {self._steps_key}, got {sorted(data)}")
        row = {key: _scalar(key, value) for key, value in data.items()}
        row.setdefault("wall_seconds", round(time.monotonic() - self._started, 3))
        with self._lock:
            if self._closed:
                raise ValueError("write after close")
            self._to.write(row)

    def close(self) -> None:
        """Flushes and closes all files. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._to.close()


class _EventLogger(base.Logger):
    """Acme's `tf.summary` logger, with the rows that it can take and no long-kept buffer."""

    # TensorBoard reloads every 30 s by itself; TensorFlow alone would keep events for 2 minutes.
    _FLUSH_SECONDS = 10.0

    def __init__(self, path: str, label: str, steps_key: str) -> None:
        from acme.utils.loggers import tf_summary  # TensorFlow; only where wanted.

        self._steps_key = steps_key
        self._flushed = -math.inf
        self._to = tf_summary.TFSummaryLogger(path, label=label, steps_key=steps_key)

    def write(self, data: Mapping[str, Any]) -> None:
        """Writes the figures that are numbers."""
        # Arrays, since TensorFlow keeps every Python number that it was ever given: a megabyte a
        # minute at fifty figures a second.
        row = {
            key: np.asarray(value, np.float32)
            for key, value in data.items()
            if isinstance(value, int | float)
        }
        # The step is kept whole: a float32 scalar cannot tell steps beyond 2^24 apart.
        row[self._steps_key] = np.asarray(data[self._steps_key], np.int64)
        self._to.write(row)
        if time.monotonic() - self._flushed > self._FLUSH_SECONDS:
            self._to.summary.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._to.close()


def _scalar(name: str, value: Any) -> Any:
    """Returns a figure as a Python number, text or None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: expected one number, got {array.dtype} of shape {array.shape}")
    return array.reshape(()).item()


def _csv_line(row: list[Any]) -> str:
    """Returns one line of CSV with its end."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(row)
    return buffer.getvalue()
