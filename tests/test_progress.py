"""Tests of the progress line."""

import io
import math

import pytest

from seedlib import progress

FIGURES = {
    "agent_steps": 375_000,
    "num_steps": 1_500_000,
    "steps_per_second": 12345.6,
    "return_mean_100": 123.45,
    "policy_lag_mean": 1.234,
    "inference_batch_mean": 31.96,
    "learner_updates": 2343,
    "wall_seconds": 3725.9,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_holds_every_figure():
    # 375 000 of 1 500 000 are 25 %; 3725 s are 1 h (3600) 2 min (120) 5 s.
    assert progress.format_progress(FIGURES, width=200) == (
        "steps 375,000/1,500,000 (25%) | 12,346 steps/s | return 123.5 | lag 1.23 | batch 32.0"
        " | updates 2,343 | 1:02:05"
    )


@pytest.mark.parametrize("value", [None, math.nan])
def test_figures_that_are_not_known_yet_are_a_dash(value):
    line = progress.format_progress({"agent_steps": 0, "return_mean_100": value}, width=200)
    assert line == "steps 0 | - steps/s | return - | lag - | batch - | updates -"


@pytest.mark.parametrize("width", range(1, 130))
def test_the_line_fits_any_width_and_keeps_what_matters_most(width):
    whole = progress.format_progress(FIGURES, width=200)
    line = progress.format_progress(FIGURES, width=width)
    assert len(line) <= width
    assert whole.startswith(line)
    if width < len(whole) and width > len("steps 375,000/1,500,000 (25%)"):
        assert line == "steps 375,000/1,500,000 (25%)" or whole[len(line) :].startswith(" | ")


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = progress.format_progress(FIGURES)
    assert line == "steps 375,000/1,500,000 (25%) | 12,346 steps/s"


def test_on_a_terminal_one_line_is_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with progress.ProgressPrinter(stream) as printer:
        printer.update({"agent_steps": 1})
        printer.update({"agent_steps": 2})
        assert "\n" not in stream.getvalue()
        printer.message("curve: here")
    shown = stream.getvalue()
    assert shown.count("\n") == 2  # The message's and the last one.
    assert shown.endswith("\n")
    pieces = shown.split("\r")
    assert [piece.split(" | ")[0] for piece in pieces[1:3]] == ["steps 1", "steps 2"]
    assert pieces[3] == "\x1b[Kcurve: here\n"
    assert pieces[4].startswith("steps 2 | ")


def test_in_a_log_there_is_a_line_each_interval_and_the_newest_at_the_end():
    stream, now = io.StringIO(), [0.0]
    printer = progress.ProgressPrinter(stream, interval=10.0, clock=lambda: now[0])
    for step, seconds in ((1, 0.0), (2, 9.9), (3, 10.0), (4, 19.9)):
        now[0] = seconds
        printer.update({"agent_steps": step})
    printer.close()
    assert [line.split(" | ")[0] for line in stream.getvalue().splitlines()] == [
        "steps 1",  # The first at once,
        "steps 3",  # then 10 s after it,
        "steps 4",  # and the newest on closing.
    ]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_closing_repeats_no_line():
    stream = io.StringIO()
    printer = progress.ProgressPrinter(stream)
    printer.update({"agent_steps": 1})
    printer.close()
    printer.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="interval must not be negative, got -1"):
        progress.ProgressPrinter(io.StringIO(), interval=-1)
