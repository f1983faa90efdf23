"""The clocks of other machines."""

from __future__ import annotations

import pytest

from forge_env.run.clock import DRIFT, Reading, RemoteClock, read_clock


def here(at: float) -> Reading:
    return Reading("here", "1", at, 1000.0 + at)


def there(at: float, boot: str = "2") -> Reading:
    """Ten seconds ahead, its wall clock three."""
    return Reading("there", boot, at + 10.0, 1003.0 + at)


def test_the_quickest_answer_tells_most() -> None:
    clock = RemoteClock()
    clock.heard(here(1.0), there(1.9), here(2.0))
    assert clock.uncertain == 0.5
    assert abs(clock.here(11.9) - 1.9) <= clock.uncertain
    clock.heard(here(3.0), there(3.001), here(3.004))
    assert clock.uncertain == pytest.approx(0.002)
    assert abs(clock.here(50.0) - 40.0) <= clock.uncertain
    quick = clock.ahead
    clock.heard(here(4.0), there(4.9), here(5.0))
    assert clock.ahead == quick
    clock.heard(here(5000.0), there(5000.04), here(5000.1))  # by now the clocks may have drifted further than that
    assert clock.uncertain == pytest.approx(0.05)
    assert clock.uncertain < 0.002 + DRIFT * 4995


def test_what_the_clock_is_ahead_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = RemoteClock()
    for _ in range(3):
        clock.heard(here(1.0), there(1.001), here(1.002))
    assert [record.getMessage() for record in caplog.records] == [
        "the clock of there is 3.0000 s ahead of this machine's (error up to 0.0010 s); the timeline uses the latter"
    ]


def test_another_life_of_the_machine_has_another_clock() -> None:
    clock = RemoteClock()
    clock.heard(here(1.0), there(1.0), here(1.002))
    clock.heard(here(2.0), there(-50.0, "3"), here(3.0))
    assert clock.here(-40.0) == pytest.approx(2.5)


def test_processes_of_one_machine_have_one_clock() -> None:
    clock = RemoteClock()
    clock.heard(read_clock(), read_clock(), read_clock())
    assert (clock.here(5.0), clock.uncertain) == (5.0, 0.0)
