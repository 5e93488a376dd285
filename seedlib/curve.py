"""Draws learning curves: the return against agent steps, one line for each run.

python -m seedlib.curve RUN_DIRECTORY... --out=curve.png
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Sequence

import numpy as np

from seedlib import run_directory

_DPI = 100


def read_curve(
    path: str | os.PathLike[str], y: str = "return_mean_100", x: str = "agent_steps"
) -> tuple[np.ndarray, np.ndarray]:
    """Reads one curve from the CSV of a run.

    A run that was resumed from a checkpoint repeats the steps since that checkpoint: points of the
    part that was given up are left out, so that `x` never goes back.

    Args:
      path: the CSV.
      y: column of the values; rows where it is empty or not finite are left out.
      x: column of the positions.

    Returns:
      Positions and values, float64 `[N]`; N may be 0.

    Raises:
      ValueError: where a column is missing, naming it, or a cell is not a number.
    """
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for column in (x, y):
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{os.fspath(path)}: no column {column}, only {reader.fieldnames}")
        points = [(_number(row[x]), _number(row[y])) for row in reader]
    points = [point for point in points if math.isfinite(point[0])]
    positions = np.array([point[0] for point in points], np.float64)
    values = np.array([point[1] for point in points], np.float64)
    # The smallest position of all later rows: a point not below it belongs to a part given up.
    later = np.minimum.accumulate(np.append(positions, np.inf)[::-1])[::-1][1:]
    keep = np.isfinite(values) & (positions < later)
    return positions[keep], values[keep]


def draw_curve(
    sources: Sequence[str | os.PathLike[str] | run_directory.RunDirectory],
    out: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    label: str = "train",
    y: str = "return_mean_100",
    x: str = "agent_steps",
    threshold: float | None = None,
    title: str | None = None,
    size: tuple[int, int] = (900, 560),
) -> str:
    """Draws a learning curve of one or several runs (seeds, for example) into a PNG.

    Args:
      sources: run directories, or paths of CSV files.
      out: the picture; written whole, or not at all.
      names: of the curves; curves of one name have one colour and one entry in the legend. None
        takes the names of the folders.
      label: which CSV of a run directory, `<label>.csv`.
      y: column of the values.
      x: column of the positions.
      threshold: value of a dashed level line, for example what counts as solved.
      title: printed above.
      size: of the picture, width and height in pixels.

    Returns:
      The path of the picture.

    Raises:
      ValueError: where there are no sources, not as many names, or a CSV lacks a column.
      FileNotFoundError: where a source does not exist.
    """
    if not sources:
        raise ValueError("a curve needs at least one run")
    paths = [_csv_path(source, label) for source in sources]
    names = _names(paths) if names is None else names
    if len(names) != len(paths):
        raise ValueError(f"{len(names)} names for {len(paths)} curves")
    curves = [read_curve(path, y, x) for path in paths]

    # The object interface keeps no global state, so that any thread may draw; `Figure` alone saves
    # through Agg and needs no display.
    from matplotlib import figure, ticker  # Heavy; only where a picture is wanted.

    picture = figure.Figure(figsize=(size[0] / _DPI, size[1] / _DPI), dpi=_DPI)
    axes = picture.add_subplot()
    colours: dict[str, str] = {}
    for name, (positions, values) in zip(names, curves, strict=True):
        shown = name if len(positions) else f"{name} (no episode yet)"
        # A single point is no line; a mark shows it.
        marker = "o" if len(positions) == 1 else None
        known = name in colours
        colour = colours.setdefault(name, f"C{len(colours)}")
        axes.plot(
            positions,
            values,
            label="_" if known else shown,  # Matplotlib lists no name that begins so.
            color=colour,
            marker=marker,
            linewidth=1.5,
        )
    if threshold is not None:
        axes.axhline(threshold, color="grey", linestyle="--", linewidth=1, label=f"{threshold:g}")
    axes.set_xlabel(_describe(x))
    axes.set_ylabel(_describe(y))
    if title:
        axes.set_title(title)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if len(curves) > 1 or threshold is not None or not len(curves[0][0]):
        axes.legend(loc="best", fontsize="small")
    picture.tight_layout()

    folder, file_name = os.path.split(os.path.abspath(os.fspath(out)))
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{file_name}.{os.getpid()}.tmp")
    try:
        picture.savefig(temporary, format="png", dpi=_DPI)
        os.replace(temporary, os.path.join(folder, file_name))
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return os.path.join(folder, file_name)


def _number(text: str | None) -> float:
    """Returns a cell's number; NaN where it is empty."""
    return float(text) if text else math.nan


def _csv_path(source: str | os.PathLike[str] | run_directory.RunDirectory, label: str) -> str:
    """Returns the CSV that a source means."""
    path = source.path if isinstance(source, run_directory.RunDirectory) else os.fspath(source)
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: no such run directory or CSV")
        return path
    inside = os.path.join(path, f"{label}.csv")
    if not os.path.exists(inside):
        others = sorted(name for name in os.listdir(path) if name.endswith(".csv"))
        raise FileNotFoundError(f"{inside}: does not exist; CSV files there: {others}")
    return inside


def _names(paths: Sequence[str]) -> list[str]:
    """Returns a short name for each CSV: its folder's, or the whole path where those repeat."""
    short = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _describe(column: str) -> str:
    """Returns an axis label for a column."""
    known = {
        "agent_steps": "agent steps",
        "return_mean_100": "mean return of the last 100 episodes",
        "wall_seconds": "wall time in seconds",
    }
    return known.get(column, column.replace("_", " "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m seedlib.curve", description="Draw the learning curves of one or more runs."
    )
    parser.add_argument("sources", nargs="+", metavar="RUN", help="a run's directory, or a CSV")
    parser.add_argument("--out", default="curve.png", help="the picture (default: %(default)s)")
    parser.add_argument(
        "--label", default="train", help="which CSV of a run (default: %(default)s)"
    )
    parser.add_argument("--x", default="agent_steps", help="column (default: %(default)s)")
    parser.add_argument("--y", default="return_mean_100", help="column (default: %(default)s)")
    parser.add_argument("--threshold", type=float, help="draw a level line here")
    parser.add_argument("--title")
    options = parser.parse_args(arguments)
    try:
        path = draw_curve(
            options.sources,
            options.out,
            label=options.label,
            y=options.y,
            x=options.x,
            threshold=options.threshold,
            title=options.title,
        )
    except (ValueError, OSError) as error:
        print(f"curve: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
