"""What the evidence around a candidate changes: spread, recurrence, who else holds the device.

Owns: rules 8 and 9, the exceptions from a class's default action and domain. Never does: I/O,
choose. Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from everstep.faults.candidates import NODE, NOTICE, PROGRAM, WATCHDOG, Candidate, Found
from everstep.faults.earlier import LOOP
from everstep.faults.records import Action, Domain
from everstep.faults.scene import Scene, bus_id
from everstep.faults.series import silent_in

LATE_S = 3600.0
"""Seconds of an attempt after which its credentials were good once."""
POD_S = 600.0
"""Seconds within which facts of several nodes of a pod are one."""
_STORED = re.compile(
    r"(?i)\b(?:uploaded|checkpoint[^\n]{0,40}(?:saved|written|committed|uploaded))\b"
)
_HUNG = re.compile(r"task \S+?:(?P<pid>\d+) blocked for more than")
_SERVED = re.compile(r"(?i)\bnfs\b|rpc_wait|lustre|ceph|fuse|sunrpc")
_TIMES = re.compile(r"([\d.]+) times")
_BRAKED = re.compile(
    r"(?i)(?:slow ?down|power brake|power cap)[^\n]{0,20}\bactive|SM \d+ MHz \(others|throttl"
)
_OUTSIDE = frozenset(("storage", "network", "user_data"))
_NAMED_NODE = frozenset(("gpu_hardware", "host", "network"))
_HOLDER = re.compile(r"Process (?P<pid>\d+) has (?P<size>[\d.]+) (?P<unit>[KMGT])iB memory in use")
_SHARE = {"K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_PATHS = re.compile(r"[\w./-]*[\w-]+\.[A-Za-z]\w+|/[\w./-]{4,}")
_STEP = re.compile(r"(?i)\b(?:global_?)?(?:step|iter(?:ation)?)[ =:#]+(?P<step>\d+)")
_PAIR = re.compile(r"(?P<a>[\w.-]+)\s?(?:/|<->|->|-)\s?(?P<b>[\w.-]+)")
_PROBE = re.compile(
    r"(?P<what>[^:]{2,60}): (?P<answer>.+)$|(?P<path>/\S+) (?P<state>is (?:not )?(?:a mount ?point|mounted).*)$"
)
_FOREIGN = re.compile(
    r"(?i)other (?:user|job|tenant|container)|not (?:one )?of (?:this|our) job|foreign|unknown process|of job \S+"
)


def settled(candidate: Candidate, found: Found) -> Candidate:
    """The candidate with what the rest of the incident says about it."""
    if candidate.domain == "gpu_hardware" and candidate.action == "restart_in_place":
        candidate = _same_again(candidate, found)
    special = _SPECIAL.get(candidate.fault)
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
    lines = [int(found["step"]) for line in scene.lines if line.source == "log"
             for found in _STEP.finditer(line.text)]  # fmt: skip
    return max(lines or beats, default=None)


# -- for every class


def _placed(candidate: Candidate, found: Found) -> Candidate:
    """Ranks and node: spread over most ranks names nobody; only some domains name a node."""
    scene = found.scene
    ranks, node = candidate.ranks, candidate.node
    if (
        candidate.level != NODE
        and candidate.place in ("job", "service")
        and candidate.domain != "network"
    ):
        ranks = frozenset()
    elif candidate.level == PROGRAM:
        ranks, node = _spread(candidate, found)
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
    if (
        len(ranks) > 1
        and len(ranks) * 2 > world
        or (world == 1 and len(ranks) == 1 and not scene.nodes)
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
    """Rule 9: the same before on other nodes is the program or its data; the same three times is
    left to a person, whatever it is that a restart in place was tried for."""
    times = found.past.times(candidate.fault)
    told = found.scene.past and _again(candidate, found)
    if candidate.domain in ("user_data", "user_code") and (times or told):
        return replace(candidate, action="stop", why="earlier attempts ended the same way")
    if times >= LOOP - 1 and candidate.action == "restart_in_place":
        return replace(candidate, action="stop", why=f"{times} earlier attempts ended the same way")
    return candidate


def _again(candidate: Candidate, found: Found) -> bool:
    """Whether an earlier attempt ended by the same type of exception or at the same path."""
    marks = {
        fact.message.split(":")[0].rpartition(".")[2] for fact in candidate.facts if fact.message
    }
    marks |= {path for fact in candidate.facts for path in _PATHS.findall(fact.message)
              if len(path) > 5}  # fmt: skip
    return any(
        re.search(r"(?i)\b(?:fail|end|crash|died|stopp|same|exit)", line.text)
        for line in found.scene.repeats(*marks)
    )


def differs(candidate: Candidate, found: Found) -> str | None:
    """The one node of several on which it happened, where another node is known to do well or to be
    set up otherwise (rule 8)."""
    scene = found.scene
    nodes = {scene.node_of(rank) for rank in candidate.ranks} | (
        {fact.node for fact in candidate.facts if fact.rank is None})  # fmt: skip
    nodes.discard(None)
    if len(nodes) != 1 or not scene.is_multi():
        return None
    node = nodes.pop()
    assert node is not None, "None was taken out"
    alive = {scene.node_of(rank) for rank in scene.alive} - {None, node}
    return node if alive or _otherwise(node, scene) else None


def _otherwise(node: str, scene: Scene) -> bool:
    """Whether the same probe gave another answer on another node."""
    answers: dict[str, dict[str, set[str]]] = {}
    for line in scene.lines:
        if line.source == "agent" and line.node and (probe := _PROBE.match(line.text)):
            what, answer = probe["what"] or probe["path"], probe["answer"] or probe["state"]
            answers.setdefault(what, {}).setdefault(line.node, set()).add(answer)
    return any(
        node in said and any(other != node and not (said[other] & said[node]) for other in said)
        for said in answers.values()
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
        nodes = {scene.node_of(rank) for rank in candidate.ranks} | {
            f.node for f in candidate.facts
        }
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


def _one_node(candidate: Candidate, found: Found) -> Candidate:
    """What fails on one node alone while others do well is that node's set-up."""
    node = differs(candidate, found) or (
        _whole_node(candidate, found) if candidate.fault in ("PERMISSION", "USER_IMPORT") else None
    )
    if node is None:
        return candidate
    domain: Domain = "host" if candidate.domain == "user_code" else candidate.domain
    return replace(candidate, domain=domain, action="restart_elsewhere", node=node,
                   why="it fails on this node and not on others")  # fmt: skip


def _token(candidate: Candidate, found: Found) -> Candidate:
    """A token that ran out in a long run is fresh in a new process; one that was never good is not."""
    late = any("expired" in fact.line.text.lower() for fact in candidate.facts) and any(
        (fact.line.time or 0.0) >= LATE_S for fact in candidate.facts
    )
    good = any(_STORED.search(line.text) for line in found.scene.lines if line.source == "log")
    expired = any(re.search(r"(?i)expired", fact.line.text) for fact in candidate.facts)
    if expired and (late or good):
        return replace(candidate, action="restart_in_place", why="the token was good before")
    return candidate


def _stalled(candidate: Candidate, found: Found) -> Candidate:
    """The kernel names the process that waits; a server that answers again stalls nobody."""
    scene = found.scene
    kernel = [fact for fact in candidate.facts if fact.line.source == "kernel"]
    again = {line.node for line in scene.lines if re.search(r"nfs: server \S+ OK\b", line.text)}
    if (
        kernel
        and all(fact.node in again for fact in kernel)
        and len(kernel) == len(candidate.facts)
    ):
        return replace(candidate, level=NOTICE, survivable=True)
    if not kernel:
        return candidate
    hung = frozenset(
        rank for line in scene.lines if line.source == "kernel" and line.node == candidate.node
        for found_pid in _HUNG.finditer(line.text)
        if (rank := scene.of_pid(line.node, int(found_pid["pid"]))) is not None
    )  # fmt: skip
    on_node = set(scene.ranks_of(candidate.node))
    ranks = hung or frozenset(silent_in(scene.beats) & on_node) or candidate.ranks
    return replace(
        candidate, ranks=ranks if len(ranks) < max(len(on_node), 2) or hung else frozenset()
    )


def _hung(candidate: Candidate, found: Found) -> Candidate:
    """A task that waits for a file server is the server's matter, not the kernel's."""
    waits = any(_SERVED.search(line.text) for line in found.scene.lines
                if line.source == "kernel" and line.node == candidate.node)  # fmt: skip
    only = all("blocked for more than" in fact.line.text for fact in candidate.facts)
    return replace(candidate, depth=1) if waits and only else candidate


def _odd_call(candidate: Candidate, found: Found) -> Candidate:
    """The rank that calls something else than most, where the fingerprints tell."""
    odd, _ = found.stuck.mismatch()
    return replace(candidate, ranks=frozenset(odd)) if odd else candidate


def _sustained(candidate: Candidate, found: Found) -> Candidate:
    """Slow for long, with a reason in its device: moving away gains more than a restart costs."""
    rank = next(iter(candidate.ranks), None)
    slow = [fact for fact in candidate.facts if (times := _TIMES.search(candidate.why)) is not None
            and float(times[1]) >= 1.3]  # fmt: skip
    reason = any(_BRAKED.search(line.text) for line in found.scene.lines
                 if line.source == "gpu" and rank in (line.rank, _named(line.text)))  # fmt: skip
    return (
        replace(candidate, action="restart_elsewhere", survivable=False, level=WATCHDOG - 2)
        if (slow and reason)
        else candidate
    )


def _named(text: str) -> int | None:
    told = re.search(r"\brank (\d+)", text)
    return int(told[1]) if told else None


def _save(candidate: Candidate, found: Found) -> Candidate:
    """A failed save is fatal only where the process ended by it."""
    ended = {end.rank for end in found.scene.ends.values() if end.code != 0}
    action: Action = "restart_in_place" if candidate.ranks & ended else "continue"
    level = PROGRAM if candidate.ranks & ended else NOTICE
    return replace(candidate, action=action, level=level, survivable=action == "continue")


def _crash(candidate: Candidate, found: Found) -> Candidate:
    """The kernel's line of a fault ties it to a node."""
    nodes = {fact.line.node for fact in found.of("NATIVE_CRASH") if fact.line.source == "kernel"}
    nodes |= {fact.groups.get("node") for fact in candidate.facts} - {None}
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
        if line.source in ("agent", "gpu", "kernel") and re.search(
            r"(?i)rdma|traffic|tx/rx|xmit|rcv", line.text
        ):
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
    "PERMISSION": _one_node,
    "USER_IMPORT": _one_node,
    "PROC_LIMITS": _one_node,
    "STALE_MOUNT": _one_node,
    "OBJ_DENIED": _token,
    "STORAGE_STALL": _stalled,
    "KERNEL_HANG": _hung,
    "COLLECTIVE_MISMATCH": _odd_call,
    "STRAGGLER": _sustained,
    "CKPT_SAVE_FAIL": _save,
    "NATIVE_CRASH": _crash,
    "PCIE_AER": _pcie,
    "GPU_LOST": _lost,
    "IB_CQE_ERR": _pairs,
    "IB_LINK_DOWN": _port,
    "ROCE_ECMP_SLOW": _slow_path,
}
