"""Delays before the next attempt."""

import itertools

import pytest

from seedlib.components.transport import backoff


def _take(count, **settings):
    return list(itertools.islice(backoff.Backoff(**settings), count))


def test_delays_double_up_to_the_maximum():
    assert _take(5, initial=1.0, maximum=5.0, jitter=0.0) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_jitter_takes_off_at_most_its_part():
    plain = _take(200, initial=1.0, maximum=8.0, jitter=0.0)
    delays = _take(200, initial=1.0, maximum=8.0, jitter=0.25, seed=1)
    assert all(0.75 * p <= d <= p for p, d in zip(plain, delays, strict=True))
    assert len(set(delays)) > 190


def test_a_seed_gives_the_same_delays_and_another_seed_others():
    assert _take(5, seed=3) == _take(5, seed=3) != _take(5, seed=4)


def test_reset_starts_over():
    delays = backoff.Backoff(initial=1.0, maximum=100.0, jitter=0.0)
    assert [next(delays), next(delays)] == [1.0, 2.0]
    delays.reset()
    assert next(delays) == 1.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"initial": 0.0}, "initial .* got 0.0"),
        ({"initial": 2.0, "maximum": 1.0}, r"maximum .*\(2.0\), got 1.0"),
        ({"maximum": float("inf")}, "maximum"),
        ({"jitter": 1.5}, "jitter .* got 1.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        backoff.Backoff(**settings)
