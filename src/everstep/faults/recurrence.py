"""Rule 9: what came before comes again: the same error, the same device, no step committed.

Owns: comparing a candidate with what is told of earlier attempts and of other jobs. Never does:
I/O, choose, budgets. Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from everstep.faults.candidates import NODE, Candidate, Found
from everstep.faults.earlier import LOOP
from everstep.faults.lines import Line
from everstep.faults.records import Domain
from everstep.faults.scene import bus_id
from everstep.faults.series import STEP, step_of

_PATHS = re.compile(r"[\w./-]*[\w-]+\.[A-Za-z]\w+|/[\w./-]{4,}")
_TYPES = re.compile(r"\w+(?:Error|Exception)\b")
_ENDED = re.compile(r"(?i)\b(?:fail|end|crash|died|stopp|same|exit)")


def looping(chosen: Candidate | None, found: Found) -> Candidate | None:
    """Attempts that follow each other without a committed step stop, whatever each of them died of;
    what the last one died of still tells where."""
    told = found.of("NO_PROGRESS_LOOP")
    if not (found.past.loops or told) or chosen is None or chosen.fault == "NO_PROGRESS_LOOP":
        return chosen
    facts = [*told, *(found.fact("NO_PROGRESS_LOOP", line) for line in found.scene.past)]
    domain: Domain = "storage" if chosen.domain == "storage" else "framework"
    return found.made(
        "NO_PROGRESS_LOOP", NODE, facts, domain=domain, ranks=chosen.ranks, place="rank",
        why=f"{len(found.past.attempts)} attempts without a committed step, each ended by "
        f"{chosen.fault}" if found.past.attempts else "attempts without a committed step",
    )  # fmt: skip


def same_again(candidate: Candidate, found: Found) -> Candidate:
    """What comes again on one device in other jobs is hardware (rule 9)."""
    past = [line for line in found.scene.past if re.search(r"(?i)\bxid\b|MMU|illegal", line.text)]
    devices = {bus_id(fact.groups["pci"]) for fact in candidate.facts if "pci" in fact.groups}
    again = [line for line in past if any(device in line.text.lower() for device in devices)
             and re.search(r"(?i)\bjobs?\b", line.text)]  # fmt: skip
    if again:
        return replace(candidate, level=NODE, action="restart_elsewhere",
                       why="the same device failed in other jobs")  # fmt: skip
    return candidate


def recurring(candidate: Candidate, found: Found) -> Candidate:
    """Rule 9: the same before on other nodes is the program or its data; the same three times is
    left to a person, whatever it is that a restart in place was tried for."""
    times = found.past.times(candidate.fault)
    if candidate.domain in ("user_data", "user_code") and _identical(candidate, found):
        return replace(candidate, action="stop", why="an earlier attempt ended the same way")
    if times >= LOOP - 1 and candidate.action in ("restart_in_place", "rollback"):
        return replace(candidate, action="stop", why=f"{times} earlier attempts ended the same way")
    return candidate


def _identical(candidate: Candidate, found: Found) -> bool:
    """Whether an earlier attempt met the class at the same step and file, as far as these are
    told."""
    lines = [line for line in found.scene.past if _ENDED.search(line.text)]
    same = [line for line in lines if _alike_in(line, candidate, found)]
    if not same and not found.past.times(candidate.fault):
        return False
    if same:
        return True
    if lines and all(_other_file(line, found) for line in lines):
        return False
    steps = {int(m["step"]) for line in found.scene.past for m in STEP.finditer(line.text)}
    now = step_of(found.scene, candidate.facts)
    often = found.past.times(candidate.fault) >= LOOP - 1
    return often or not steps or now is None or now in steps


def _alike_in(line: Line, candidate: Candidate, found: Found) -> bool:
    """Whether a line of the past names the same type of exception, and no other file."""
    types = {fact.message.split(":")[0].rpartition(".")[2] for fact in candidate.facts} - {""}
    if candidate.fault == "CUDA_OOM":  # of a class that also comes by chance the step decides
        return False
    return any(kind in line.text for kind in types) and not _other_file(line, found)


def _other_file(line: Line, found: Found) -> bool:
    """Whether a line of the past names files of which nothing is said this time."""
    types = _TYPES.findall(line.text)
    paths = [path for path in _PATHS.findall(line.text) if "." in path.rpartition("/")[2]]
    files = [path for path in paths if path.rpartition(".")[2] not in types]
    past = {id(each) for each in found.scene.past}
    return bool(files) and not any(
        path in each.text for each in found.scene.lines if id(each) not in past for path in files
    )
