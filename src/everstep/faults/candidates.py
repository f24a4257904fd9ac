"""Candidates: what may be the root, on which ranks and node, and how strong that is.

Owns: the levels of evidence, the record of a candidate, all facts of an incident. Never does: I/O,
choose. Called by: the modules that make candidates, :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from everstep.faults.catalog import Catalog, Place
from everstep.faults.collective import Stuck
from everstep.faults.earlier import Earlier
from everstep.faults.lines import Line
from everstep.faults.match import Fact
from everstep.faults.records import Action, Domain
from everstep.faults.scene import Scene
from everstep.faults.stacks import Stack, stacks_in
from everstep.faults.tracebacks import Raised

_PID = re.compile(r"\bpid:? ?(\d+)")

NODE, PROGRAM, OUTLIER, DEGRADED, PEER, WATCHDOG, SIGNAL, NOTICE = 50, 40, 36, 35, 30, 20, 10, 5
"""Levels of evidence: kind before time (rule 1)."""


@dataclass(frozen=True)
class Candidate:
    """What may be the root: its place, its facts, and the earliest time of them."""

    fault: str
    domain: Domain
    action: Action
    level: int
    place: Place
    depth: int
    facts: tuple[Fact, ...]
    ranks: frozenset[int] = frozenset()
    node: str | None = None
    why: str = ""
    survivable: bool = False
    nodes: frozenset[str] = frozenset()
    pod: str = ""

    @property
    def time(self) -> float | None:
        times = [fact.line.time for fact in self.facts if fact.line.time is not None]
        return min(times) if times else None

    @property
    def order(self) -> tuple[float, int]:
        """Where it begins: by time; within one signal by line."""
        return min(
            ((fact.line.time if fact.line.time is not None else 0.0, fact.line.order)
             for fact in self.facts), default=(0.0, 0),
        )  # fmt: skip


@dataclass
class Found:
    """All facts of an incident; they do not change any more once it is made."""

    scene: Scene
    catalog: Catalog
    facts: list[Fact] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    span: tuple[float, float] | None = None
    past: Earlier = field(default_factory=lambda: Earlier(frozenset(), {}, False))
    stuck: Stuck = field(default_factory=Stuck)
    aside: list[tuple[Fact, str]] = field(default_factory=list)
    """What had no part in the end, with the reason."""
    touched: dict[str | None, frozenset[int]] = field(default_factory=dict)
    """What was found out once of a node: its only rank that shows anything."""

    def of(self, *faults: str) -> list[Fact]:
        """The facts of some classes, in their order."""
        if len(faults) == 1:
            return self._by_fault.get(faults[0], [])
        return [fact for fact in self.facts if fact.fault in faults]

    @cached_property
    def _by_fault(self) -> dict[str, list[Fact]]:
        by: dict[str, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            by[fact.fault].append(fact)
        return dict(by)

    @cached_property
    def stacks(self) -> list[Stack]:
        """The last stack of each rank."""
        return stacks_in(self.scene.lines)

    @cached_property
    def tellers(self) -> dict[int, set[int | None]]:
        """Ranks whose exceptions name the number of a process, by that number."""
        ranks: dict[int, set[int | None]] = defaultdict(set)
        for raised in self.raised:
            for number in _PID.findall(raised.message):
                ranks[int(number)].add(raised.line.rank)
        return dict(ranks)

    def made(self, fault: str, level: int, facts: Iterable[Fact], **more: object) -> Candidate:
        """A candidate of a class with the class's defaults."""
        means = self.catalog.meanings[fault]
        base = Candidate(
            fault, means.domain, means.action, level, means.place, means.depth, tuple(facts),
            survivable=means.survivable,
        )  # fmt: skip
        return replace(base, **more)  # type: ignore[arg-type]

    def fact(self, fault: str, line: Line) -> Fact:
        """A fact of a class that no pattern of a line showed."""
        return Fact(self.catalog.meanings[fault], line)
