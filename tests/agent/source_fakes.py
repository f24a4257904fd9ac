"""What tests of the sources of signals share: clocks that are set, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from everstep.faults.catalog import load
from everstep.faults.lines import lines_of
from everstep.faults.match import Fact, facts_of
from everstep.faults.records import Signal

DEADLINE = 20.0


class SetClock:
    """Stands where it is set."""

    def __init__(self, mono: float = 1000.0, wall: float = 1.7e9) -> None:
        self.mono_now = mono
        self.wall_now = wall

    def mono(self) -> float:
        return self.mono_now

    def wall(self) -> float:
        return self.wall_now

    def pass_(self, seconds: float) -> None:
        self.mono_now += seconds
        self.wall_now += seconds


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.002)


def facts(*signals: Signal) -> list[Fact]:
    """What the catalogue sees in signals."""
    lines = [line for n, signal in enumerate(signals) for line in lines_of(signal, n, {})]
    return facts_of(lines, load())


def classes(*signals: Signal) -> list[str]:
    return [fact.fault for fact in facts(*signals)]
