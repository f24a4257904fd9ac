"""Stuck collectives: which rank did not join.

Owns: the watchdog's lines, sequence numbers, the flight recorder's words, barriers. Never does:
I/O, weigh against other evidence. Called by: :mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.faults.lines import Line
from everstep.faults.scene import numbers_in

_RANK = re.compile(r"\[Rank (\d+)\]|\bRank (\d+)\] ")
_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+),"
    r" NumelOut=(?P<out>\d+))?"
)
_FINGERPRINT = re.compile(
    r"(?i)Rank (?P<rank>\d+) is running (?:collective:"
    r" )?(?:CollectiveFingerPrint\()?(?:SequenceNumber=(?P<seq>\d+), ?)?"
    r"OpType=(?P<op>\w+)(?:, ?TensorShape=\[(?P<shape>[\d, ]*)\])?"
)
_STATUS = re.compile(
    r"(?i)last enqueued (?:NCCL )?work: (?P<queued>-?\d+), last completed (?:NCCL )?work:"
    r" (?P<done>-?\d+)"
)
_GROUP = re.compile(r"PG GUID (?P<guid>\w+)|\[PG \d+ \((?P<name>\w+)\)")
_AT = re.compile(r"(?i)at work(?: sequence id)?: (\d+)")
_UNEVEN = re.compile(r"SEND|RECV|ALLTOALL|GATHER$|^SCATTER|COALESCED")
"""Operations whose ranks rightly call other things, or with other sizes."""
_MISSING = re.compile(
    r"(?i)\bmissing ranks?:?\s*[{\[(]?(?P<ranks>\d[\d, ]*)[}\])]?"
    r"|ranks? (?P<r2>[\d, ]+) (?:did not join|never joined|(?:is|are) missing)"
)
_BARRIER = re.compile(
    r"(?i)\bRanks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier"
    r"|Caused by:? .*rank (?P<r2>\d+)"
)
_GIL = re.compile(r"(?i)could not acquire GIL")
_FIRST = re.compile(r"(?i)First PG on this rank (?:to signal dumping|that detected)")
_OBSERVED = re.compile(r"(?i)Observed flight recorder dump signal|Received a dump signal")
_FROM = re.compile(r"(?i)due to a collective timeout from\s+rank (?P<rank>\d+)")
_BLAMES = ("culprit", "laggard", "suspect", "straggl", "joined", "waiting for")
_CULPRIT = re.compile(
    r"(?i)(?:culprit|laggard|suspect(?:ed)?|straggl\w+|not (?:yet )?joined"
    r"|waiting for)[^\n]{0,20}\branks?:? ?[{\[(]?(?P<ranks>\d[\d, ]*)"
)


@dataclass
class Stuck:
    """What is known of stuck collectives. ``waiting``: ranks that timed out or have work pending;
    ``idle``: ranks with nothing pending; ``missing``: ranks that a recorder or a barrier names."""

    waiting: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    barrier: set[int] = field(default_factory=set)
    gil: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)
    ops: dict[tuple[str, int], dict[int, tuple[str, str]]] = field(default_factory=dict)
    queued: dict[tuple[str, int], int] = field(default_factory=dict)
    stuck_at: dict[str, int] = field(default_factory=dict)
    observed: set[int] = field(default_factory=set)
    first: set[int] = field(default_factory=set)

    def culprits(self, world: int) -> tuple[set[int], str]:
        """The ranks that did not join, with the reason; empty where nothing names them."""
        if self.missing:
            return set(self.missing), "the flight recorder misses it in the collective"
        if idle := self._minority(self.idle - self.waiting, world):
            return idle, "it has no work pending while the others wait"
        if behind := self._minority(self._behind(), world):
            return behind, "it has issued fewer collectives than the others"
        if gil := self._minority(self.gil, world):
            return gil, "it alone cannot take the interpreter's lock"
        if silent := self._minority(self.observed - self.first - self.waiting, world):
            return silent, "it only observed the dump signal and waits for nothing"
        return set(), ""

    def _minority(self, ranks: set[int], world: int) -> set[int]:
        """A group is suspect only where more ranks than it are known to wait."""
        others = (self.waiting | self.heard) - ranks
        return (
            ranks if ranks and len(ranks) < max(len(others), 1) and others and world != 1 else set()
        )

    def _behind(self) -> set[int]:
        """Ranks that have not issued what others of the same group are stuck in."""
        return {
            rank
            for (group, rank), queued in self.queued.items()
            if queued < self.stuck_at.get(group, queued)
        } - self.waiting

    def mismatch(self) -> tuple[set[int], bool]:
        """Ranks that called another operation under the same number, and whether any did."""
        for calls in self.ops.values():
            kinds = Counter(calls.values())
            if len(kinds) > 1:
                (common, count), *others = kinds.most_common()
                if count > others[0][1]:
                    return {rank for rank, call in calls.items() if call != common}, True
                return set(), True
        return set(), False


def stuck_in(lines: Iterable[Line]) -> Stuck:
    """Read the lines about collectives."""
    stuck = Stuck()
    ops: dict[tuple[str, int], dict[int, tuple[str, str]]] = defaultdict(dict)
    works: dict[tuple[int, int], tuple[str, str]] = {}
    groups: dict[tuple[int, int], str] = {}
    for line in lines:
        if line.source not in ("log", "agent"):
            continue
        text = line.text
        low = text.lower()
        _named(text, low, stuck)
        for call in _FINGERPRINT.finditer(text) if "is running" in text else ():
            ops["debug", int(call["seq"] or 0)][int(call["rank"])] = (
                call["op"],
                call["shape"] or "",
            )
        rank = _rank(line)
        if rank is None:
            continue
        if "WorkNCCL" in text and (work := _WORK.search(text)):
            stuck.waiting.add(rank)
            stuck.heard.add(rank)
            works[rank, int(work["seq"])] = (work["op"], work["numel"] or "")
        if "last enqueued" in low:
            _status(stuck, rank, text, groups)
        if "dump signal" in low and _OBSERVED.search(text):
            stuck.heard.add(rank)
            stuck.observed.add(rank)
        if "first pg" in low and _FIRST.search(text):
            stuck.first.add(rank)
        if "gil" in low and _GIL.search(text):
            stuck.gil.add(rank)
        if "watchdog got stuck" in text:
            stuck.heard.add(rank)
    for (rank, seq), made in works.items():
        if (group := groups.get((rank, seq))) and not _UNEVEN.search(made[0]):
            ops[group, seq][rank] = made
    stuck.ops = dict(ops)
    return stuck


def _named(text: str, low: str, stuck: Stuck) -> None:
    """Ranks that a line names as absent. ``low``: the text in lower case."""
    if ("missing" in low or "join" in low) and (found := _MISSING.search(text)):
        stuck.missing |= numbers_in(found["ranks"] or found["r2"])
    elif ("barrier" in low or "caused by" in low) and (found := _BARRIER.search(text)):
        stuck.barrier |= numbers_in(found["ranks"] or found["r2"] or "")
    elif any(word in low for word in _BLAMES) and (found := _CULPRIT.search(text)):
        stuck.missing |= numbers_in(found["ranks"])
    if "collective timeout from" in low and (found := _FROM.search(text)):
        stuck.waiting.add(int(found["rank"]))


def _status(stuck: Stuck, rank: int, text: str, groups: dict[tuple[int, int], str]) -> None:
    """One line ``last enqueued work: .., last completed work: ..`` of a group."""
    status = _STATUS.search(text)
    if status is None:
        return
    queued, done = int(status["queued"]), int(status["done"])
    group = _group(text)
    stuck.heard.add(rank)
    stuck.queued[group, rank] = max(queued, stuck.queued.get((group, rank), queued))
    (stuck.idle if queued == done else stuck.waiting).add(rank)
    if at := _AT.search(text):
        stuck.stuck_at[group] = max(int(at[1]), stuck.stuck_at.get(group, 0))
        groups[rank, int(at[1])] = group


def _group(text: str) -> str:
    """The name of a process group that is the same on all of its ranks, where it is told."""
    found = _GROUP.search(text)
    return (found["guid"] or found["name"] or "") if found else ""


def _rank(line: Line) -> int | None:
    if line.rank is not None:
        return line.rank
    found = _RANK.search(line.text)
    return int(found[1] or found[2]) if found else None
