"""One line that says how a run is doing, live on a terminal or now and then in a log."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_UNKNOWN = "-"


def format_progress(progress: Mapping[str, Any], width: int | None = None) -> str:
    """Returns the figures of a run as one line.

    Args:
      progress: what `RunDirectory.read_progress` returns. Used, each where it is there:
        `agent_steps`, `num_steps`, `steps_per_second`, `return_mean_100`, `policy_lag_mean`,
        `inference_batch_mean`, `learner_updates`, `episodes`, `wall_seconds` and `status`, a text
        that is shown in front.
      width: columns; None means those of the terminal. Where the line is too long, figures are
        left out from the right, where the least important stand.
    """
    if width is None:
        width = shutil.get_terminal_size().columns
    steps, limit = progress.get("agent_steps"), progress.get("num_steps")
    counted = _whole(steps)
    if steps is not None and limit:
        counted += f"/{_whole(limit)} ({100 * steps / limit:.0f}%)"
    parts = [
        f"steps {counted}",
        f"{_whole(progress.get('steps_per_second'))} steps/s",
        f"return {_short(progress.get('return_mean_100'))}",
        f"lag {_short(progress.get('policy_lag_mean'))}",
        f"batch {_short(progress.get('inference_batch_mean'))}",
        f"updates {_whole(progress.get('learner_updates'))}",
    ]
    if "episodes" in progress:
        parts.append(f"episodes {_whole(progress['episodes'])}")
    if "wall_seconds" in progress:
        parts.append(_duration(progress["wall_seconds"]))
    if progress.get("status"):
        parts.insert(0, str(progress["status"]))
    while len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    return " | ".join(parts)[: max(width, 1)]


class ProgressPrinter:
    """Shows progress on a stream: a live line on a terminal, else a line now and then.

    Not for several threads at once: the one that drives the run calls it.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prints nothing yet.

        Args:
          stream: where to; None means standard error.
          interval: seconds between lines where the stream is no terminal; at least 0.
          clock: seconds from a fixed point.

        Raises:
          ValueError: where `interval` is negative.
        """
        if not interval >= 0:
            raise ValueError(f"interval must not be negative, got {interval}")
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._interval = interval
        self._clock = clock
        self._printed_at = -math.inf
        self._last: Mapping[str, Any] | None = None
        self._pending = False

    def update(self, progress: Mapping[str, Any]) -> None:
        """Shows `progress`, if it is time to.

        Args:
          progress: see `format_progress`.
        """
        self._last, self._pending = progress, True
        if self._live:
            # One column is left free: a full line makes some terminals wrap. The escape clears
            # what a longer line before left at the right.
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + format_progress(progress, columns) + "\x1b[K")
            self._stream.flush()
        elif self._clock() - self._printed_at >= self._interval:
            self._print_line(progress)

    def message(self, text: str) -> None:
        """Prints a line of its own, above the live line where there is one."""
        self._stream.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self._stream.flush()
        if self._live and self._last is not None:
            self.update(self._last)

    def close(self) -> None:
        """Leaves the newest figures on the screen and the cursor on a fresh line."""
        if self._live and self._last is not None:
            self._stream.write("\n")
            self._stream.flush()
        elif self._pending and self._last is not None:
            self._print_line(self._last)
        self._last, self._pending = None, False

    def __enter__(self) -> "ProgressPrinter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print_line(self, progress: Mapping[str, Any]) -> None:
        """Prints the whole line; a log has no width."""
        self._stream.write(format_progress(progress, sys.maxsize) + "\n")
        self._stream.flush()
        self._printed_at, self._pending = self._clock(), False


def _known(value: Any) -> bool:
    """Returns whether a figure is a finite number."""
    return value is not None and math.isfinite(value)


def _whole(value: Any) -> str:
    """Returns a figure as a whole number with its thousands apart."""
    return f"{value:,.0f}" if _known(value) else _UNKNOWN


def _short(value: Any) -> str:
    """Returns a figure with as many decimals as its size deserves."""
    if not _known(value):
        return _UNKNOWN
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"


def _duration(seconds: Any) -> str:
    """Returns seconds as m:ss or h:mm:ss."""
    if not _known(seconds):
        return _UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
