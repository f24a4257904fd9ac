"""Earlier attempts and other jobs, as agents tell of them in words (rule 9).

Owns: counting attempts, which of them ended alike, whether any committed. Never does: I/O, budgets
(the job's own history is counted elsewhere). Called by: :mod:`everstep.faults.recurrence`,
:mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.faults.catalog import Catalog
from everstep.faults.lines import Line
from everstep.faults.scene import numbers_in

LOOP = 3
"""Attempts without progress after which no further one is made."""

_ATTEMPT = re.compile(r"(?i)\battempts? (?P<numbers>\d+(?: ?(?:-|to|,|and) ?\d+)*)")
_START = re.compile(r"(?i)\bstart(?:ed|s)?(?: at)? step (?P<step>\d+)")
_NONE = re.compile(
    r"(?i)\bno (?:new(?:er)? )?(?:committed |new |newer )?(?:checkpoint|commit|step|progress)"
    r"|nothing (?:was )?committed"
    r"|without (?:a |any )?(?:new |newer )?(?:commit\w*|checkpoint|progress)"
    r"|last (?:committed|checkpoint) (?:step )?\d* ?(?:step \d+ )?in (?:all|both|each)"
)


@dataclass(frozen=True)
class Earlier:
    """``attempts``: their numbers; ``faults``: for each class, the attempts of which it is told;
    ``idle``: it is told that none of them committed."""

    attempts: frozenset[int]
    faults: dict[str, frozenset[int]]
    idle: bool

    @property
    def loops(self) -> bool:
        """Whether attempts follow each other without progress."""
        return self.idle and len(self.attempts) >= LOOP

    def times(self, fault: str) -> int:
        """In how many earlier attempts a class was met."""
        return len(self.faults.get(fault, ()))


def earlier(lines: list[Line], catalog: Catalog) -> Earlier:
    """Read the lines about the past."""
    attempts: set[int] = set()
    faults: dict[str, set[int]] = {}
    starts: dict[int, str] = {}
    idle = False
    for line in lines:
        idle |= bool(_NONE.search(line.text))
        marks = list(_ATTEMPT.finditer(line.text))
        for place, mark in enumerate(marks):
            end = marks[place + 1].start() if place + 1 < len(marks) else len(line.text)
            text = line.text[mark.start() : end]
            numbers = numbers_in(mark["numbers"])
            attempts |= numbers
            for name in _faults_in(text, catalog):
                faults.setdefault(name, set()).update(numbers)
            if start := _START.search(text):
                starts |= dict.fromkeys(numbers, start["step"])
    if len(starts) >= LOOP and len(set(starts.values())) == 1:
        idle = True
    return Earlier(
        frozenset(attempts), {name: frozenset(numbers) for name, numbers in faults.items()}, idle
    )


def _faults_in(text: str, catalog: Catalog) -> set[str]:
    return {catalog.patterns[number].meaning.fault for number in catalog.found_in(text)}
