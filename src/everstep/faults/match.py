"""Lines into facts: which signatures of the catalogue a line shows.

Owns: the one search of all lines, denials, what a line captures. Never does: I/O, weigh
facts. Called by: :mod:`everstep.faults.scene`, :mod:`everstep.faults.facts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from everstep.faults.catalog import Catalog, Kind, Meaning, Pattern, Place
from everstep.faults.lines import Line
from everstep.faults.records import Severity
from everstep.faults.topics import TOPICS

_DENIAL = re.compile(
    r"(?i)(?:\b(?:no|without|not an?|never|neither|nor|free of|zero)\s+(?:[\w-]+\s+){0,2}|\bnot "
    r"|(?:^|[,;:(] ?|\b(?:has|had|with|found|are|shows?) )0 (?:[\w-]+ ){0,1})$"
)
_DENIALS = (
    "no",
    "No",
    "NO",
    "ne",
    "Ne",
    "NE",
    "ithout",
    "ITHOUT",
    "ree of",
    "REE OF",
    "ero ",
    "ERO ",
    "0 ",
)
"""Any denial has one of them."""
_NOT_PLAIN = (*_DENIALS, "cause")
_GUESS = re.compile(
    r"(?i)\b(?:potential|possible|likely|common) (?:root )?causes?\b"
    r"|\b(?:may|might|could|can) (?:also )?be caused by\b|\b(?:typically|usually|often) caused by\b"
)
"""What programs guess of the causes, from here to the end of the line."""
_DENIED_WITHIN = re.compile(r"(?i)\b(?:no|without|zero)\s+(?:[\w-]+\s+){0,2}$")
"""A denial of the last word of what matched; for patterns that are no denials themselves."""
_PAST = re.compile(
    r"(?i)^(?:history\b|last (?:week|day)|\d+ other jobs?\b|other jobs?\b)"
    r"|\b(?:previous|earlier|last) (?:attempts?|runs?)\b|\battempts? \d"
)
_TOPICS = tuple(TOPICS)
_NOW = re.compile(r"(?i)\bsent (?:SIG|signal)|\bSIG\w+ (?:was )?sent\b")


class Fact(msgspec.Struct, frozen=True):
    """One thing that a line says. ``groups``: what its pattern captured. ``frame`` and ``message``:
    of the exception whose line it is, where it is one."""

    meaning: Meaning
    line: Line
    groups: dict[str, str] = {}
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


class Index:
    """Lines by the patterns that they may match and by their topics, in their order."""

    def __init__(self, lines: Iterable[Line], catalog: Catalog) -> None:
        self.catalog = catalog
        self._hits: list[tuple[Line, tuple[int, ...]]] = []
        self._about: dict[str, list[Line]] = {topic: [] for topic in TOPICS}
        known: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for line in lines:
            found = known.get(line.text)
            if found is None:
                found = known[line.text] = self._searched(line.text)
            if found[0]:
                self._hits.append((line, found[0]))
            for topic in found[1]:
                self._about[topic].append(line)

    def about(self, topic: str) -> list[Line]:
        """The lines that may speak of a topic."""
        return self._about[topic]

    def matched(self) -> list[Line]:
        """The lines that may match a pattern."""
        return [line for line, _ in self._hits]

    def facts(self) -> list[Fact]:
        """Every fact of the lines; of one class the first pattern that matches a line counts."""
        patterns = self.catalog.patterns
        found: list[Fact] = []
        for line, numbers in self._hits:
            if is_past(line):
                continue
            seen: set[str] = set()
            for number in numbers:
                pattern = patterns[number]
                if pattern.meaning.fault not in seen and (fact := _fact(pattern, line)):
                    seen.add(pattern.meaning.fault)
                    found.append(fact)
        return found

    def _searched(self, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        count = len(self.catalog.patterns)
        numbers = sorted(self.catalog.search.Match(text) or ())
        first = next((i for i, number in enumerate(numbers) if number >= count), len(numbers))
        return tuple(numbers[:first]), tuple(_TOPICS[number - count] for number in numbers[first:])


def facts_of(lines: Iterable[Line], catalog: Catalog) -> list[Fact]:
    """Every fact of some lines by themselves."""
    return Index(lines, catalog).facts()


def _fact(pattern: Pattern, line: Line) -> Fact | None:
    if pattern.sources and line.source not in pattern.sources:
        return None
    if pattern.unless is not None and pattern.unless.search(line.text):
        return None
    text = line.text
    if not pattern.captures and not any(word in text for word in _NOT_PLAIN):
        return Fact(pattern.meaning, line)  # where in the line it stands is of no account
    match = pattern.regex.search(text)
    if match is None or _denied(text[max(0, match.start() - 40) : match.start()]):
        return None
    if not pattern.negative and _DENIED_WITHIN.search(match[0].rpartition(" ")[0] + " "):
        return None
    if "cause" in text and (guess := _GUESS.search(text)) and guess.start() < match.start():
        return None
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    return Fact(pattern.meaning, line, groups)


def _denied(before: str) -> bool:
    return any(word in before for word in _DENIALS) and _DENIAL.search(before) is not None
