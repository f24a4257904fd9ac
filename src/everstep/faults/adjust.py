"""What the evidence around a candidate changes: spread, recurrence, loops, places.

Owns: rules 8 and 9, whom a class may name. Never does: I/O, choose. Called by:
:mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from everstep.faults.candidates import NODE, OUTLIER, PEER, PROGRAM, Candidate, Found
from everstep.faults.earlier import LOOP
from everstep.faults.lines import Line
from everstep.faults.records import Domain
from everstep.faults.scene import Scene, bus_id
from everstep.faults.special import SPECIAL

POD_S = 600.0
"""Seconds within which facts of several nodes of a pod are one."""


_OUTSIDE = frozenset(("storage", "network", "user_data"))


_NAMED_NODE = frozenset(("gpu_hardware", "host", "network"))


_PATHS = re.compile(r"[\w./-]*[\w-]+\.[A-Za-z]\w+|/[\w./-]{4,}")


_TYPES = re.compile(r"\w+(?:Error|Exception)\b")
_ENDED = re.compile(r"(?i)\b(?:fail|end|crash|died|stopp|same|exit)")
_STEP = re.compile(r"(?i)\b(?:global_?)?(?:step|iter(?:ation)?)[ =:#]+(?P<step>\d+)")


def settled(candidate: Candidate, found: Found) -> Candidate:
    """The candidate with what the rest of the incident says about it."""
    if candidate.domain == "gpu_hardware" and candidate.action == "restart_in_place":
        candidate = _same_again(candidate, found)
    special = SPECIAL.get(candidate.fault)
    if special is not None:
        candidate = special(candidate, found)
    if candidate.level in (PROGRAM, NODE):
        candidate = _recurring(candidate, found)
    return _placed(candidate, found)


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


def harmless(candidate: Candidate, found: Found) -> Candidate:
    """Of something that training survived nobody is to blame and nothing is done."""
    del found
    if candidate.fault == "STRAGGLER":
        return candidate
    return replace(candidate, action="continue", ranks=frozenset(), node=None)


def spread_over(group: list[Candidate], found: Found) -> Candidate | None:
    """One fault on several nodes: of one pod, of all nodes, or the first by far."""
    first, second = group[0], group[1]
    if first.time is not None and second.time is not None and second.time - first.time > 60:
        return first
    facts = tuple(fact for candidate in group for fact in candidate.facts)
    ranks = frozenset().union(*(candidate.ranks for candidate in group))
    nodes = frozenset(candidate.node for candidate in group if candidate.node)
    everywhere = len(nodes) * 2 > len(found.scene.nodes)
    return replace(
        first, facts=facts, node=None, ranks=frozenset() if everywhere else ranks, nodes=nodes,
        why=f"the same on {len(nodes)} nodes",
    )  # fmt: skip


def of_pod(group: list[Candidate], found: Found) -> Candidate | None:
    """Several nodes of one pod within ten minutes: the pod is blamed, not its nodes."""
    pods = {found.scene.incident.pods.get(candidate.node or "", "") for candidate in group}
    times = [candidate.time for candidate in group if candidate.time is not None]
    if len(pods) != 1 or "" in pods or (times and max(times) - min(times) > POD_S):
        return None
    deepest = max(group, key=lambda candidate: (candidate.depth, candidate.node or ""))
    nodes = frozenset(candidate.node for candidate in group if candidate.node)
    ranks = frozenset(rank for node in nodes for rank in found.scene.ranks_of(node))
    pod = pods.pop()
    return replace(deepest, node=None, nodes=nodes, ranks=ranks, pod=pod,
                   why=f"{len(nodes)} nodes of {pod} within ten minutes")  # fmt: skip


def step_of(scene: Scene, candidate: Candidate) -> int | None:
    """The newest training step that the lines of the incident speak of before its end."""
    own = [
        int(found["step"]) for fact in candidate.facts for found in _STEP.finditer(fact.line.text)
    ]
    if own:
        return max(own)
    beats = [beat.step for beat in scene.beats if beat.step is not None]
    lines = [
        int(found["step"])
        for line in scene.lines
        if line.source == "log" and ("step" in line.text or "iter" in line.text)
        for found in _STEP.finditer(line.text)
    ]
    return max(lines or beats, default=None)


def _placed(candidate: Candidate, found: Found) -> Candidate:
    """Ranks and node: spread over most ranks names nobody; only some domains name a node."""
    scene = found.scene
    ranks, node = candidate.ranks, candidate.node
    if (
        candidate.level != NODE
        and candidate.place in ("job", "service")
        and candidate.domain not in ("network", "communication")
    ):
        ranks = frozenset()
    elif candidate.level == PROGRAM:
        ranks, node = _spread(candidate, found)
    elif (
        candidate.place == "rank"
        and candidate.level in (PEER, OUTLIER)
        and (len(ranks) > 1 and len(ranks) * 2 > scene.world)
    ):
        ranks, node = frozenset(), None
    if candidate.domain in _NAMED_NODE and candidate.place != "path" and node is None and ranks:
        nodes = {scene.node_of(rank) for rank in ranks}
        node = nodes.pop() if len(nodes) == 1 else None
    return replace(candidate, ranks=ranks, node=node)


def _spread(candidate: Candidate, found: Found) -> tuple[frozenset[int], str | None]:
    scene, ranks, node = found.scene, candidate.ranks, candidate.node
    if candidate.domain in ("host", "gpu_hardware") and node is not None:
        return ranks, node
    world = max(scene.world, 1)
    if (
        candidate.domain == "user_code"
        and ranks
        and len(ranks | _alike(candidate, found)) == world > 1
    ):
        return frozenset(), None
    if (len(ranks) > 1 and len(ranks) * 2 > world) or (
        world == 1 and len(ranks) == 1 and not scene.nodes
    ):
        return frozenset() if len(ranks) > 1 else ranks, None
    if candidate.domain in _OUTSIDE and len({scene.node_of(rank) for rank in ranks}) > 1:
        return frozenset(), None
    return ranks, node


def _alike(candidate: Candidate, found: Found) -> frozenset[int]:
    """Ranks without a word of their own that ended with the same code at the same time."""
    ends = found.scene.ends
    codes = {ends[rank].code for rank in candidate.ranks if rank in ends}
    times = [ends[rank].time or 0.0 for rank in candidate.ranks if rank in ends]
    heard = {line.rank for line in found.scene.lines if line.source == "log"}
    return frozenset(
        end.rank for end in ends.values()
        if end.code > 0 and {end.code} == codes and end.rank not in heard
        and abs((end.time or 0.0) - min(times)) <= 2.0
    )  # fmt: skip


def _recurring(candidate: Candidate, found: Found) -> Candidate:
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
    steps = {int(m["step"]) for line in found.scene.past for m in _STEP.finditer(line.text)}
    now = step_of(found.scene, candidate)
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


def _same_again(candidate: Candidate, found: Found) -> Candidate:
    """What comes again on one device in other jobs is hardware (rule 9)."""
    past = [line for line in found.scene.past if re.search(r"(?i)\bxid\b|MMU|illegal", line.text)]
    devices = {bus_id(fact.groups["pci"]) for fact in candidate.facts if "pci" in fact.groups}
    again = [line for line in past if any(device in line.text.lower() for device in devices)
             and re.search(r"(?i)\bjobs?\b", line.text)]  # fmt: skip
    if again:
        return replace(candidate, level=NODE, action="restart_elsewhere",
                       why="the same device failed in other jobs")  # fmt: skip
    return candidate
