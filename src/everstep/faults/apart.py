"""Facts that had no part in the end of an attempt, each with the reason.

Owns: which of them are left out, and in which order that is asked. Never does: I/O, choose. Called
by: :mod:`everstep.faults.facts`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from everstep.faults.foreign import foreign, names_process
from everstep.faults.lines import is_of_others
from everstep.faults.match import Fact
from everstep.faults.scene import Scene, is_structured
from everstep.faults.survival import ENDS_S, STEPS_S, Onset, onset, outlived
from everstep.faults.tracebacks import Raised

PRINTED = "a program's output is no word of a kernel or a scheduler"
BARE = "another rank ended first, by an exception of its own"

_OTHERS = frozenset(("gpu_hardware", "host", "scheduler"))
_LIBRARY = re.compile(r"\b(?:CUDA|HIP|NCCL|cuDNN)\b|HW Exception by GPU")


def set_apart(
    told: list[Fact], raised: Iterable[Raised], scene: Scene
) -> tuple[list[Fact], list[tuple[Fact, str]]]:
    """Facts that may have to do with the end, and those that have not."""
    on: dict[str | None, list[Raised]] = defaultdict(list)
    for each in raised if any(map(names_process, told)) else ():
        on[each.line.node or scene.node_of(each.line.rank)].append(each)
    structured = is_structured(scene.incident)
    why = [_of_others(fact, on, scene, structured) for fact in told]
    # When it began to fail is told by errors of peers: of those that are no part of it, none.
    began = onset((fact for fact, said in zip(told, why, strict=True) if not said), scene)
    for number, fact in enumerate(told):
        if not why[number] and fact.kind == "program":
            why[number] = outlived(fact, scene, began)
    left = [(number, fact) for number, fact in enumerate(told) if not why[number]]
    for number in _beside(left, began, scene):
        why[number] = BARE
    pairs = list(zip(told, why, strict=True))
    return [fact for fact, said in pairs if not said], [pair for pair in pairs if pair[1]]


def _of_others(
    fact: Fact, raised: dict[str | None, list[Raised]], scene: Scene, structured: bool
) -> str:
    if structured and _is_printed(fact, scene):
        return PRINTED
    if names_process(fact) and (said := foreign(fact, raised, scene)):
        return said
    return "" if fact.kind == "program" else outlived(fact, scene, None)


def _is_printed(fact: Fact, scene: Scene) -> bool:
    """Whether a rank's own output says what is a kernel's or a scheduler's to say. What a library
    tells of its own calls stays."""
    line, domain = fact.line, fact.meaning.domain
    if line.source != "log" or scene.incident.signals[line.signal].rank is None or fact.message:
        return False
    if fact.kind != "node":
        return fact.kind == "program" and "pid" in fact.groups
    if domain in _OTHERS and fact.place != "rank":
        return _LIBRARY.search(line.text) is None
    return (domain == "network" and "NCCL" not in line.text) or is_of_others(line.text)


def _beside(told: list[tuple[int, Fact]], began: Onset | None, scene: Scene) -> list[int]:
    """Where a traceback stands right before the first end of all, of its rank: what ranks that did
    not end first said in a line alone, or in a traceback long before that they lived on after,
    until they were ended by us."""
    programs = [(number, fact) for number, fact in told if fact.kind == "program"]
    if began is None or not any(_is_end(fact, began) for _, fact in programs):
        return []
    return [
        number for number, fact in programs
        if fact.line.source == "log" and fact.line.rank is not None
        and fact.line.rank not in began.first and fact.severity != "notice"
        and (not fact.frame or _lived(fact, began, scene))
    ]  # fmt: skip


def _is_end(fact: Fact, began: Onset) -> bool:
    if not fact.frame or fact.line.rank not in began.first:
        return False
    return fact.line.time is None or fact.line.time >= began.ended - ENDS_S


def _lived(fact: Fact, began: Onset, scene: Scene) -> bool:
    time = fact.line.time
    return time is not None and time < began.ended - STEPS_S and fact.line.rank in scene.ours
