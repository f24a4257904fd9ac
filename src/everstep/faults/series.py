"""Figures over time: losses that jump, ranks that are slow, ranks that stopped beating.

Owns: the forms of progress lines, step times and heartbeats, thresholds. Never does: I/O, weigh
against other evidence. Called by: :mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from everstep.faults.lines import Line
from everstep.faults.match import Fact
from everstep.faults.records import Verdict
from everstep.faults.scene import Beat, Scene

JUMP = 1.6
"""A loss this many times the level before it is a spike."""
PLATEAU_STEPS = 100
"""A jump that has not come back for so many steps is no spike any more."""
SLOW = 1.05
"""A rank whose computing takes this many times the median sets the pace."""
SILENT_S = 20.0
"""A heartbeat older than this stands still: an agent acts on a hang after 30 s."""
WAITS = 0.3
"""A rank that waits for this share of its computing waits for another one."""

_LOSS = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|it)\b[ =:#]*(?P<step>\d+).*?\b(?:lm[ _]"
    r"|train[ _])?loss\b[\"']?[ =:]*(?P<loss>[-+\d.eE]+|nan|inf)"
)
STEP = re.compile(r"(?i)\b(?:global_?)?(?:step|iter(?:ation)?)[ =:#]+(?P<step>\d+)")
_NOT_FINITE = re.compile(r"\bEVS-900: rank \d+: non-finite value at step (?P<step>\d+)")
_SUM = re.compile(r"(?i)\brank (\d+)[ =:]+(?:0x)?([0-9a-f]{6,64})\b")
_COMPUTE = re.compile(r"\bcompute_s=(?P<compute>[\d.]+)(?:.*?\bwait_s=(?P<wait>[\d.]+))?")
_COLLECTIVE = re.compile(
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|collective|\bcomm\b|communicat"
    r"|wait"
)


@dataclass(frozen=True)
class Spike:
    """A finite jump of the loss; ``lasting``: it did not come back."""

    line: Line
    step: int
    lasting: bool


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for, ``times`` the median of their computing."""

    line: Line
    rank: int
    times: float


def spike_in(lines: list[Line]) -> Spike | None:
    """The first jump of the loss in the progress lines, if there is one."""
    points: dict[int, tuple[float, Line]] = {}
    seen: set[str] = set()
    for line in lines:
        if line.source != "log" or line.text in seen:
            continue
        seen.add(line.text)
        if found := _LOSS.search(line.text):
            try:
                points.setdefault(int(found["step"]), (float(found["loss"]), line))
            except ValueError:
                continue
    steps = sorted(step for step in points if math.isfinite(points[step][0]))
    for place in range(1, len(steps)):
        before = [points[step][0] for step in steps[max(0, place - 10) : place]]
        level, (loss, line) = median(before), points[steps[place]]
        if level > 0 and loss > JUMP * level:
            after = [step for step in steps[place:] if points[step][0] > 1.3 * level]
            last = steps[-1]
            lasting = after[-1] == last and last - steps[place] >= PLATEAU_STEPS
            return Spike(line, steps[place], lasting)
    return None


def straggler_in(lines: list[Line]) -> Slow | None:
    """The one rank whose computing is the longest and that waits least."""
    times: dict[int, tuple[float, float, Line]] = {}
    for line in lines:
        found = _COMPUTE.search(line.text) if line.source == "steptime" else None
        if found and line.rank is not None:
            times[line.rank] = (float(found["compute"]), float(found["wait"] or 0), line)
    if len(times) < 3:
        return None
    level = median(compute for compute, _, _ in times.values())
    slow = [rank for rank, (compute, _, _) in times.items() if compute > SLOW * level]
    if len(slow) != 1 or level <= 0:
        return None
    compute, wait, line = times[slow[0]]
    least = min(other for rank, (_, other, _) in times.items() if rank != slow[0])
    return Slow(line, slow[0], compute / level) if wait <= least else None


def odd_sum_in(lines: list[Line]) -> tuple[Line, set[int]] | None:
    """The few ranks whose checksum of replicated values is another than most others'."""
    for line in lines:
        sums = {int(rank): value for rank, value in _SUM.findall(line.text)}
        counts = Counter(sums.values()).most_common()
        if len(sums) >= 3 and len(counts) > 1 and counts[0][1] > len(sums) / 2:
            return line, {rank for rank, value in sums.items() if value != counts[0][0]}
    return None


def silent_in(beats: list[Beat]) -> set[int]:
    """Ranks that stand outside a collective, or a step behind, while others wait in one."""
    old = [beat for beat in beats if beat.age >= SILENT_S]
    waiting = {beat.rank for beat in old if _COLLECTIVE.search(beat.phase)}
    other = {beat.rank for beat in old if beat.phase and not _COLLECTIVE.search(beat.phase)}
    if waiting and other and len(other) <= len(waiting):
        return other
    steps = {beat.rank: beat.step for beat in old if beat.step is not None}
    if len(steps) > 2:
        top = max(steps.values())
        behind = {rank for rank, step in steps.items() if step < top}
        if behind and len(behind) < len(steps) - len(behind):
            return behind
    return set()


def step_of(scene: Scene, facts: Iterable[Fact]) -> int | None:
    """The newest training step that the lines of the incident speak of before its end."""
    own = [int(found["step"]) for fact in facts for found in STEP.finditer(fact.line.text)]
    if own:
        return max(own)
    beats = [beat.step for beat in scene.beats if beat.step is not None]
    texts = {
        line.text
        for line in scene.lines
        if line.source == "log" and ("step" in line.text or "iter" in line.text)
    }
    told = [int(found["step"]) for text in texts for found in STEP.finditer(text)]
    return max(told or beats, default=None)


def first_symptom(verdict: Verdict) -> int | None:
    """The step at which values were no numbers first, where a rank says so of an earlier one than
    the step that the verdict is of. Only everstep's own lines count: a program may count its steps
    otherwise."""
    if verdict.domain != "numerical" or verdict.step is None:
        return None
    found = (_NOT_FINITE.search(item.text) for item in verdict.evidence)
    first = min((int(at["step"]) for at in found if at), default=verdict.step)
    return first if first < verdict.step else None


def waiting_in(beats: list[Beat], lines: list[Line]) -> set[int]:
    """Ranks that stand in a collective since long, or whose steps are mostly waiting."""
    waits = {beat.rank for beat in beats if beat.age >= SILENT_S and _COLLECTIVE.search(beat.phase)}
    for line in lines:
        found = _COMPUTE.search(line.text) if line.source == "steptime" else None
        if (
            found
            and line.rank is not None
            and float(found["wait"] or 0) > WAITS * float(found["compute"])
        ):
            waits.add(line.rank)
    return waits
