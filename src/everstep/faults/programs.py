"""Candidates among ends of processes: errors of the program, crashes, signals from outside.

Owns: which fact of a rank counts, which of them are one thing, who survived. Never does: I/O,
choose. Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from everstep.faults.candidates import NOTICE, OUTLIER, PROGRAM, SIGNAL, Candidate, Found
from everstep.faults.exits import ABORT, BUS, CRASHES, TERM, End
from everstep.faults.match import Fact
from everstep.faults.scene import Scene

WENT_ON = 3
"""Steps that its output tells of after an error of a rank, from which on it went on."""


def program_candidates(found: Found) -> list[Candidate]:
    """Ends of processes that are no trouble of communication: one candidate for each class."""
    best: dict[int | None, Fact] = {}
    lived = [fact for fact, _ in found.aside if fact.kind == "program" and fact.message]
    for fact in found.facts:
        if fact.kind != "program" or fact.severity == "notice":
            continue
        if _survived(fact, found.scene):
            lived.append(fact)
            continue
        old = best.get(fact.rank)
        if old is None or fact.key < old.key:
            best[fact.rank] = fact
    for end in found.scene.ends.values():
        crash = _crash(end)
        if crash and end.rank not in found.scene.ours and _weaker(best.get(end.rank), found, crash):
            best[end.rank] = of_end(found, crash, end)
    loose = best.pop(None, None)
    if loose is not None and all(loose.fault != fact.fault for fact in best.values()):
        best[None] = loose
    groups: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in best.values():
        groups[fact.fault, _signature(fact)].append(fact)
    made = [_program_candidate(fault, facts, found) for (fault, _), facts in groups.items()]
    return made + _lived(lived, found)


def external_ends(found: Found) -> list[Candidate]:
    """Ends by SIGTERM that nobody of ours sent."""
    scene = found.scene
    if found.of("USER_CANCEL"):
        return []
    theirs = [end for end in scene.ends.values() if end.rank not in scene.ours]
    deaths = [end for end in theirs if end.code != 0 and end.signal not in (TERM, ABORT)]
    first = min((end.time for end in deaths if end.time is not None), default=None)
    outside = [
        end for end in theirs
        if end.signal == TERM
        and not (deaths and (first is None or end.time is None or end.time >= first))
    ]  # fmt: skip
    told = found.of("SIGTERM_EXTERNAL")
    if not outside:
        return [found.made("SIGTERM_EXTERNAL", SIGNAL, told, ranks=_known(told))] if told else []
    facts = told + [of_end(found, "SIGTERM_EXTERNAL", end) for end in outside]
    times = [end.time for end in outside if end.time is not None]
    errors = [fact.line.time for fact in found.facts
              if fact.kind in ("peer", "watchdog") and fact.line.time is not None]  # fmt: skip
    early = not errors or not times or min(times) <= min(errors) + 2.0
    nodes = {scene.node_of(end.rank) or end.node for end in outside}
    return [
        found.made(
            "SIGTERM_EXTERNAL", OUTLIER if early else SIGNAL, facts,
            ranks=frozenset(end.rank for end in outside),
            node=nodes.pop() if len(nodes) == 1 else None,
            why="it was ended by a SIGTERM that nobody of ours sent",
        )
    ]  # fmt: skip


def of_end(found: Found, fault: str, end: End) -> Fact:
    """A fact about the end of a process; a launcher's line names its rank and node in words."""
    groups = {"rank": str(end.rank)} | ({"node": end.node} if end.node else {})
    return Fact(found.catalog.meanings[fault], end.line, groups)


def _lived(facts: list[Fact], found: Found) -> list[Candidate]:
    """What ranks went on after: a note, for classes that training survives."""
    return [
        replace(_program_candidate(fact.fault, [fact], found), level=NOTICE)
        for fact in facts if fact.survivable
    ]  # fmt: skip


def _signature(fact: Fact) -> str:
    """What makes errors of the program the same: type and frame, else type and text. Other classes
    say by themselves that it is one thing."""
    if fact.fault not in ("USER_EXCEPTION", "USER_ASSERT"):
        return ""
    kind, _, text = fact.message.partition(": ")
    return f"{kind} {fact.frame or re.sub(r'[0-9]+', '#', text)}"


def _weaker(fact: Fact | None, found: Found, crash: str) -> bool:
    return fact is None or (
        fact.depth < found.catalog.known[crash].depth and fact.fault == "USER_EXCEPTION"
    )


def _survived(fact: Fact, scene: Scene) -> bool:
    """Whether its rank went on: it ended well, or still beats after it."""
    rank = fact.rank
    if rank is None:
        went_on = not scene.ends and scene.steps_after(fact.line) >= WENT_ON
        return went_on or (bool(scene.ends) and not scene.dead and fact.survivable)
    if rank in scene.ends:
        return scene.ends[rank].code == 0
    if scene.steps_after(fact.line) >= WENT_ON:
        return True
    time = fact.line.time
    return rank in scene.alive and any(
        time is None or beat.time is None or beat.time > time + beat.age
        for beat in scene.beats_of[rank]
    )


def _crash(end: End) -> str | None:
    if end.signal in CRASHES:
        return "NATIVE_CRASH"
    return "SIGBUS_SHM" if end.signal == BUS else None


def _program_candidate(fault: str, facts: list[Fact], found: Found) -> Candidate:
    facts = sorted(facts, key=lambda fact: (fact.line.time or 0.0, fact.line.order, fact.line.text))
    chosen = max(facts, key=lambda fact: fact.depth)
    named = [fact.ranks for fact in facts if "ranks" in fact.groups]
    ranks = frozenset().union(*(named or [fact.ranks for fact in facts]))
    nodes = {fact.node for fact in facts if fact.rank is None} - {None}
    if not ranks and len(nodes) == 1:
        ranks = _failing_on(nodes.copy().pop(), found)
    if not ranks:
        ranks = _of_ends(found)
    return found.made(fault, PROGRAM, facts, ranks=ranks, **chosen.traits)


def _failing_on(node: str | None, found: Found) -> frozenset[int]:
    """Ranks of a node that ended by themselves, where only their node was told."""
    return frozenset(
        rank for fact in found.facts if fact.kind == "program"
        for rank in fact.ranks if rank in found.scene.ranks_of(node)
    )  # fmt: skip


def _of_ends(found: Found) -> frozenset[int]:
    """Output that names no rank is of the ranks that ended by themselves, as a launcher tells."""
    scene = found.scene
    return frozenset(end.rank for end in scene.ends.values()
                     if end.code > 0 and end.rank not in scene.ours)  # fmt: skip


def _known(facts: list[Fact]) -> frozenset[int]:
    return frozenset(fact.rank for fact in facts if fact.rank is not None)
