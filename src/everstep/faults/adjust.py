"""What the evidence around a candidate changes: spread, recurrence, who else holds the device.

Owns: rules 8 and 9, the exceptions from a class's default action and domain. Never does: I/O,
choose. Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from everstep.faults.candidates import NODE, NOTICE, PROGRAM, Candidate, Found
from everstep.faults.records import Action
from everstep.faults.scene import Scene, bus_id

_OUTSIDE = frozenset(("storage", "network", "user_data"))
_NAMED_NODE = frozenset(("gpu_hardware", "host", "network"))
_HOLDER = re.compile(r"Process (?P<pid>\d+) has (?P<size>[\d.]+) (?P<unit>[KMGT])iB memory in use")
_SHARE = {"K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_PATHS = re.compile(r"[\w./-]*[\w-]+\.[A-Za-z]\w+|/[\w./-]{4,}")
_STEP = re.compile(r"(?i)\b(?:global_?)?(?:step|iter(?:ation)?)[ =:#]+(?P<step>\d+)")
_PAIR = re.compile(r"(?P<a>[\w.-]+)\s?(?:/|<->|->|-)\s?(?P<b>[\w.-]+)")
_FOREIGN = re.compile(r"(?i)other (?:user|job|tenant|container)|not (?:one )?of (?:this|our) job|foreign|unknown process|of job \S+")


def settled(candidate: Candidate, found: Found) -> Candidate:
    """The candidate with what the rest of the incident says about it."""
    special = _SPECIAL.get(candidate.fault)
    if special is not None:
        candidate = special(candidate, found)
    if candidate.level in (PROGRAM, NODE):
        candidate = _recurring(candidate, found)
    return _placed(candidate, found)


def harmless(candidate: Candidate, found: Found) -> Candidate:
    """Of something that training survived nobody is to blame and nothing is done."""
    del found
    if candidate.fault == "STRAGGLER":
        return candidate
    keep = candidate.ranks if candidate.fault in ("CKPT_SAVE_FAIL",) else frozenset()
    node = candidate.node if candidate.fault == "CLOCK_SKEW" else None
    return replace(candidate, action="continue", ranks=keep, node=node)


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


def step_of(scene: Scene, candidate: Candidate) -> int | None:
    """The newest training step that the lines of the incident speak of before its end."""
    own = [int(found["step"]) for fact in candidate.facts for found in _STEP.finditer(fact.line.text)]
    if own:
        return max(own)
    beats = [beat.step for beat in scene.beats if beat.step is not None]
    lines = [int(found["step"]) for line in scene.lines if line.source == "log"
             for found in _STEP.finditer(line.text)]  # fmt: skip
    return max(lines or beats, default=None)


# -- for every class


def _placed(candidate: Candidate, found: Found) -> Candidate:
    """Ranks and node: spread over most ranks names nobody; only some domains name a node."""
    scene = found.scene
    ranks, node = candidate.ranks, candidate.node
    if candidate.level != NODE and candidate.place in ("job", "service") and candidate.domain != "network":
        ranks = frozenset()
    elif candidate.level == PROGRAM:
        ranks, node = _spread(candidate, found)
    if candidate.domain in _NAMED_NODE and node is None and ranks:
        nodes = {scene.node_of(rank) for rank in ranks}
        node = nodes.pop() if len(nodes) == 1 else None
    return replace(candidate, ranks=ranks, node=node)


def _spread(candidate: Candidate, found: Found) -> tuple[frozenset[int], str | None]:
    scene, ranks, node = found.scene, candidate.ranks, candidate.node
    if candidate.domain in ("host", "gpu_hardware") and node is not None:
        return ranks, node
    world = max(scene.world, 1)
    if candidate.domain == "user_code" and ranks and len(ranks | _alike(candidate, found)) == world > 1:
        return frozenset(), None
    if len(ranks) > 1 and len(ranks) * 2 > world or (world == 1 and len(ranks) == 1 and not scene.nodes):
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


def _whole_node(candidate: Candidate, found: Found) -> str | None:
    """The node, where all its ranks fail alike and those of another node do not."""
    scene = found.scene
    if not scene.is_multi() or not candidate.ranks:
        return None
    for node, ranks in scene.nodes.items():
        if set(ranks) == set(candidate.ranks) and len(ranks) > 1:
            return node
    return None


def _recurring(candidate: Candidate, found: Found) -> Candidate:
    """Rule 9: the same before on other nodes is the program or its data; on this device or node in
    other jobs it is hardware."""
    scene = found.scene
    if not scene.past:
        return candidate
    if candidate.domain in ("user_data", "user_code", "framework") and _again(candidate, found):
        return replace(candidate, action="stop", why="earlier attempts ended the same way")
    return candidate


def _again(candidate: Candidate, found: Found) -> bool:
    marks = {candidate.fault}
    for fact in candidate.facts:
        if fact.message:
            marks.add(fact.message.split(":")[0].rpartition(".")[2])
        marks |= {path for path in _PATHS.findall(fact.message) if len(path) > 5}
    return any(
        re.search(r"(?i)\b(?:fail|end|crash|died|stopp|same|exit)", line.text)
        for line in found.scene.repeats(*marks)
    )


# -- for one class each


def _cuda_oom(candidate: Candidate, found: Found) -> Candidate:
    scene = found.scene
    holders = {
        int(m["pid"]): float(m["size"]) * _SHARE[m["unit"]]
        for fact in candidate.facts for m in _HOLDER.finditer(fact.line.text)
    }  # fmt: skip
    own = {pid for _, pid in scene.pids}
    foreign = {pid for pid, size in holders.items() if size >= 2.0 and pid not in own}
    if foreign:
        said = [line.text for line in scene.lines if any(str(pid) in line.text for pid in foreign)
                and line.source in ("agent", "gpu")]  # fmt: skip
        other = any(_FOREIGN.search(text) for text in said)
        nodes = {scene.node_of(rank) for rank in candidate.ranks} | {f.node for f in candidate.facts}
        nodes.discard(None)
        return replace(
            candidate, domain="host", action="restart_elsewhere" if other else "restart_in_place",
            node=nodes.pop() if len(nodes) == 1 else None,
            why="another process holds memory of the GPU",
        )  # fmt: skip
    if len(candidate.ranks) > 1 and len(candidate.ranks) * 2 >= scene.world:
        return replace(candidate, action="stop", why="it does not fit on most ranks alike")
    return candidate


def _illegal(candidate: Candidate, found: Found) -> Candidate:
    """An illegal access with an Xid on one device is that device's until it comes again elsewhere."""
    devices = {(fact.line.node, bus_id(fact.groups["pci"])) for fact in found.of("XID_31", "XID_13_69")
               if "pci" in fact.groups}  # fmt: skip
    if len(devices) == 1 and len(candidate.ranks) <= 1:
        past = found.scene.repeats("illegal", "Xid 31", "Xid 13", "MMU")
        if not past or _same_device(past, next(iter(devices))[1]):
            return replace(candidate, level=NOTICE)
    return candidate


def _same_device(past: list[object], device: str) -> bool:
    return all(device in getattr(line, "text", "").lower() for line in past)


def _software_xid(candidate: Candidate, found: Found) -> Candidate:
    """Xid 13 and 31 again on one device in other jobs are hardware (rule 9)."""
    past = [line for line in found.scene.past if re.search(r"(?i)\bxid\b|MMU|illegal", line.text)]
    devices = {bus_id(fact.groups["pci"]) for fact in candidate.facts if "pci" in fact.groups}
    again = [line for line in past if any(device in line.text.lower() for device in devices)
             and re.search(r"(?i)\bjobs?\b", line.text)]  # fmt: skip
    if again:
        return replace(candidate, level=NODE, action="restart_elsewhere",
                       why="the same device failed in other jobs")  # fmt: skip
    return candidate


def _one_node(candidate: Candidate, found: Found) -> Candidate:
    """Refused or missing on all ranks of one node alone: that node is set up differently."""
    node = _whole_node(candidate, found)
    if node is None:
        return candidate
    return replace(candidate, domain="host", action="restart_elsewhere", node=node,
                   why="all ranks of this node fail and those of others do not")  # fmt: skip


def _node_of_path(candidate: Candidate, found: Found) -> Candidate:
    """A path that fails on all ranks of one node alone is that node's mount or disk."""
    node = _whole_node(candidate, found)
    return replace(candidate, node=node) if node is not None else candidate


def _save(candidate: Candidate, found: Found) -> Candidate:
    """A failed save is fatal only where the process ended by it."""
    ended = {end.rank for end in found.scene.ends.values() if end.code != 0}
    action: Action = "restart_in_place" if candidate.ranks & ended else "continue"
    level = PROGRAM if candidate.ranks & ended else NOTICE
    return replace(candidate, action=action, level=level, survivable=action == "continue")


def _crash(candidate: Candidate, found: Found) -> Candidate:
    """The kernel's line of a fault ties it to a node."""
    nodes = {fact.line.node for fact in found.of("NATIVE_CRASH") if fact.line.source == "kernel"}
    nodes |= {found.scene.node_of(rank) for rank in candidate.ranks if found.scene.is_multi()}
    nodes.discard(None)
    ranks = candidate.ranks
    if not ranks:
        pids = [int(fact.groups["pid"]) for fact in candidate.facts if "pid" in fact.groups]
        ranks = frozenset(r for pid in pids if (r := found.scene.of_pid(None, pid)) is not None)
    return replace(candidate, ranks=ranks, node=nodes.pop() if len(nodes) == 1 else None)


def _pcie(candidate: Candidate, found: Found) -> Candidate:
    """A port's error took those devices that are gone with it; else all of the node."""
    gone = [fact for fact in found.of("XID_79", "GPU_LOST") if fact.line.node == candidate.node]
    ranks = {found.scene.of_device(candidate.node, fact.groups["pci"])
             for fact in gone if "pci" in fact.groups}  # fmt: skip
    known = frozenset(rank for rank in ranks if rank is not None)
    return replace(candidate, ranks=known) if known else candidate


def _lost(candidate: Candidate, found: Found) -> Candidate:
    """``4 of 4 GPUs listed`` denies it; which one is missing may be told by its index."""
    scene = found.scene
    facts = []
    for fact in candidate.facts:
        count = re.search(r"(\d+) of (\d+) GPU", fact.line.text)
        if count is None or int(count[1]) < int(count[2]):
            facts.append(fact)
    if not facts:
        return replace(candidate, level=0)
    if len(candidate.ranks) == 1:
        return replace(candidate, facts=tuple(facts))
    on_node = scene.ranks_of(candidate.node)
    local = {int(m[1]) for fact in facts
             for m in re.finditer(r"(?i)(?:GPU ?|index )(\d+)\b(?!:)", fact.line.text)
             if int(m[1]) < len(on_node)}  # fmt: skip
    told = {int(m[1]) for fact in facts for m in re.finditer(r"\brank (\d+)", fact.line.text)}
    if told:
        return replace(candidate, facts=tuple(facts), ranks=frozenset(told))
    if len(local) == 1:
        return replace(candidate, facts=tuple(facts), ranks=frozenset((on_node[local.pop()],)))
    return replace(candidate, facts=tuple(facts))


def _pairs(candidate: Candidate, found: Found) -> Candidate:
    """Rule 9 for pairs of cards: one node in every failing pair is at fault."""
    scene = found.scene
    pairs: list[set[str]] = [
        {m["a"], m["b"]} for line in scene.past for m in _PAIR.finditer(line.text)
        if m["a"] in scene.nodes and m["b"] in scene.nodes
    ]  # fmt: skip
    here = {node for fact in candidate.facts for node in (
        fact.node, scene.node_at(fact.groups["address"]) if "address" in fact.groups else None)
        if node}  # fmt: skip
    common = set.intersection(*pairs) if pairs else set()
    if here and common:
        common &= here
    if len(pairs) >= 2 and len(common) == 1:
        node = common.pop()
        own = {fact.rank for fact in candidate.facts if fact.rank in scene.ranks_of(node)}
        return replace(candidate, action="restart_elsewhere", node=node,
                       ranks=frozenset(rank for rank in own if rank is not None),
                       why="it is one end of every failing pair")  # fmt: skip
    return replace(candidate, ranks=frozenset(), node=None)


def _slow_path(candidate: Candidate, found: Found) -> Candidate:
    """No traffic at all of one node is no slow path but a dead one."""
    scene = found.scene
    for line in scene.lines:
        if line.source in ("agent", "gpu", "kernel") and re.search(r"(?i)rdma|traffic|tx/rx|xmit|rcv", line.text):
            still = {m[1] for m in re.finditer(r"([\w.-]+):? (?:0(?:\.0)? ?[KMG]?B|no traffic)\b", line.text)
                     if m[1] in scene.nodes}  # fmt: skip
            if len(still) == 1:
                node = still.pop()
                return replace(candidate, action="restart_elsewhere", node=node,
                               ranks=frozenset(scene.ranks_of(node)), survivable=False,
                               why="its traffic stands still while the others' does not")  # fmt: skip
    return replace(candidate, ranks=frozenset(), node=None)


def _port(candidate: Candidate, found: Found) -> Candidate:
    """The ranks of the node that met the port's errors; all of it where none tells."""
    on_node = set(found.scene.ranks_of(candidate.node))
    met = frozenset(fact.rank for fact in found.of("IB_LINK_DOWN", "IB_CQE_ERR")
                    if fact.line.rank is not None and fact.rank in on_node)  # fmt: skip
    ranks = frozenset(rank for rank in met if rank is not None)
    return replace(candidate, ranks=ranks or candidate.ranks)


_SPECIAL: dict[str, Callable[[Candidate, Found], Candidate]] = {
    "CUDA_OOM": _cuda_oom,
    "ILLEGAL_ADDR_SW": _illegal,
    "XID_13_69": _software_xid,
    "XID_31": _software_xid,
    "PERMISSION": _one_node,
    "USER_IMPORT": _one_node,
    "STALE_MOUNT": _node_of_path,
    "DISK_FULL": _node_of_path,
    "FS_READONLY_IO": _node_of_path,
    "CKPT_SAVE_FAIL": _save,
    "NATIVE_CRASH": _crash,
    "PCIE_AER": _pcie,
    "GPU_LOST": _lost,
    "IB_CQE_ERR": _pairs,
    "IB_LINK_DOWN": _port,
    "ROCE_ECMP_SLOW": _slow_path,
}
