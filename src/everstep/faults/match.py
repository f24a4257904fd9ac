"""Lines into facts: which signatures of the catalogue a line shows.

Owns: the search, denials, what a line captures. Never does: I/O, weigh facts. Called by:
:mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.faults.catalog import Catalog, Kind, Meaning, Pattern, Place
from everstep.faults.lines import Line
from everstep.faults.records import Severity

_DENIAL = re.compile(
    r"(?i)(?:\b(?:no|without|not an?|never|neither|nor|free of|zero)\s+(?:[\w-]+\s+){0,2}|\bnot "
    r"|(?:^|[,;:(] ?|\b(?:has|had|with|found|are|shows?) )0 (?:[\w-]+ ){0,1})$"
)
_PAST = re.compile(
    r"(?i)^(?:history\b|last (?:week|day)|\d+ other jobs?\b|other jobs?\b)"
    r"|\b(?:previous|earlier|last) (?:attempts?|runs?)\b|\battempts? \d"
)
_NOW = re.compile(r"(?i)\bsent (?:SIG|signal)|\bSIG\w+ (?:was )?sent\b")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a line says. ``groups``: what its pattern captured. ``frame`` and ``message``:
    of the exception whose line it is, where it is one."""

    meaning: Meaning
    line: Line
    groups: dict[str, str] = field(default_factory=dict)
    frame: str = ""
    message: str = ""

    @property
    def fault(self) -> str:
        return self.meaning.fault

    @property
    def kind(self) -> Kind:
        return self.meaning.kind

    @property
    def severity(self) -> Severity:
        return self.meaning.severity

    @property
    def place(self) -> Place:
        return self.meaning.place

    @property
    def depth(self) -> int:
        return self.meaning.depth

    @property
    def survivable(self) -> bool:
        return self.meaning.survivable

    @property
    def traits(self) -> dict[str, object]:
        """What a candidate has from it."""
        means = self.meaning
        return {
            "action": means.action, "domain": means.domain, "place": means.place,
            "depth": means.depth, "survivable": means.survivable,
        }  # fmt: skip

    @property
    def rank(self) -> int | None:
        named = self.groups.get("rank")
        return int(named) if named is not None else self.line.rank

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that the line names as those on which it happened, else who says it."""
        named = self.groups.get("ranks")
        if named is not None:
            return frozenset(int(number) for number in re.findall(r"\d+", named))
        return frozenset() if self.rank is None else frozenset((self.rank,))

    @property
    def key(self) -> tuple[float, float, int, str]:
        """The more specific first, then the earlier."""
        time = self.line.time if self.line.time is not None else 0.0
        return (-self.depth, time, self.line.order, self.line.text)

    @property
    def node(self) -> str | None:
        return self.groups.get("node") or self.line.node


def is_past(line: Line) -> bool:
    """Whether a line tells of earlier attempts or of other jobs: no fact of this incident."""
    if line.source != "agent" or _NOW.search(line.text):
        return False
    return (line.time is not None and line.time < 0) or _PAST.search(line.text) is not None


def facts_of(lines: Iterable[Line], catalog: Catalog) -> list[Fact]:
    """Every fact of the lines; of one class the first pattern that matches a line counts."""
    found: list[Fact] = []
    for line in lines:
        if not line.text or is_past(line):
            continue
        numbers = sorted(catalog.prefilter.Match(line.text) or ())
        seen: set[str] = set()
        for number in numbers:
            pattern = catalog.patterns[number]
            if pattern.meaning.fault not in seen and (fact := _fact(pattern, line)):
                seen.add(pattern.meaning.fault)
                found.append(fact)
    return found


def _fact(pattern: Pattern, line: Line) -> Fact | None:
    if pattern.sources and line.source not in pattern.sources:
        return None
    if pattern.unless is not None and pattern.unless.search(line.text):
        return None
    match = pattern.regex.search(line.text)
    if match is None or _DENIAL.search(line.text[max(0, match.start() - 40) : match.start()]):
        return None
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    return Fact(pattern.meaning, line, groups)
