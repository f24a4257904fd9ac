"""What a benchmark found: the stable shape of ``--json``.

Owns: the records and whether a goal is reached. Never does: I/O. Called by: the benchmarks, table.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.bench.figures import Spread

FORMAT = "everstep.bench/1"

Kind = Literal["recover", "save", "memory", "classify"]
Unit = Literal["s", "steps", "bytes", "count", "ratio"]


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured. ``load`` is the 1-minute load average before the first sample: above
    about 0.3 somebody else was at work."""

    cores: int
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    everstep: str
    folder: str
    filesystem: str
    load: float


class Goal(msgspec.Struct, frozen=True):
    """``value`` is to be at most ``most`` (below it, where ``strict``)."""

    text: str
    value: float
    most: float
    strict: bool = False

    @property
    def reached(self) -> bool:
        return self.value < self.most if self.strict else self.value <= self.most


class Figure(msgspec.Struct, frozen=True):
    """One row: what was measured of whom, in ``unit``.

    ``beside`` names the peer or the physical limit that stands next to it, ``beside_value`` is its
    median in the same unit, ``ratio`` the spread of the ratios within each round.
    """

    of: str
    what: str
    unit: Unit
    value: Spread
    beside: str = ""
    beside_value: float | None = None
    ratio: Spread | None = None


class GoalReport(msgspec.Struct, frozen=True):
    """A goal as ``--json`` has it."""

    text: str
    value: float
    most: float
    reached: bool


class Result(msgspec.Struct, frozen=True):
    """One benchmark. ``samples`` holds every round's raw figures, in the order they were taken,
    so that anybody can do other statistics on them."""

    bench: Kind
    machine: Machine
    parameters: dict[str, float | int | str]
    figures: tuple[Figure, ...]
    goals: tuple[GoalReport, ...]
    notes: tuple[str, ...]
    samples: dict[str, list[dict[str, float | None]]]
    format: str = FORMAT

    @property
    def reached(self) -> bool:
        """Whether every goal is reached."""
        return all(goal.reached for goal in self.goals)


def report(goals: list[Goal]) -> tuple[GoalReport, ...]:
    """The goals with their answers."""
    return tuple(GoalReport(g.text, g.value, g.most, g.reached) for g in goals)
