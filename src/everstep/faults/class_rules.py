"""Classes whose action, domain or root depends on more than their own lines.

Owns: one function for each such class. Never does: I/O, choose. Called by:
:mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from everstep.faults.candidates import DEGRADED, NOTICE, PEER, PROGRAM, WATCHDOG, Candidate, Found
from everstep.faults.exits import INT, KILL, TERM
from everstep.faults.lines import Line
from everstep.faults.match import Fact
from everstep.faults.records import Domain
from everstep.faults.scene import bus_id
from everstep.faults.series import silent_in, straggler_in
from everstep.faults.spread import differs, whole_node

LATE_S = 3600.0
"""Seconds of an attempt after which its credentials were good once."""


_STORED = re.compile(
    r"(?i)\b(?:uploaded|checkpoint[^\n]{0,40}(?:saved|written|committed|uploaded))\b"
)


_HUNG = re.compile(r"task \S+?:(?P<pid>\d+) blocked for more than")


_SERVED = re.compile(r"(?i)\bnfs\b|rpc_wait|lustre|ceph|fuse|sunrpc")


_TIMES = re.compile(r"([\d.]+) times")


_UP = re.compile(r"(?i)link (?:is )?up\b|port active|carrier (?:acquired|up)|state (?:\d: )?ACTIVE")
_PORT = re.compile(r"\b(?:mlx\d_\w+(?::\d)?|ib\d+|en[ops]\w+|eth\d+|bond\d+|bnxt\w+)\b")
_BRAKED = re.compile(
    r"(?i)(?:slow ?down|power brake|power cap)[^\n]{0,20}\bactive|SM \d+ MHz \(others|throttl"
)


_HOLDER = re.compile(r"Process (?P<pid>\d+) has (?P<size>[\d.]+) (?P<unit>[KMGT])iB memory in use")


_SHARE = {"K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}


_PAIR = re.compile(r"(?P<a>[\w.-]+)\s?(?:/|<->|->|-)\s?(?P<b>[\w.-]+)")


_TRAFFIC = re.compile(r"(?i)rdma|traffic|tx/rx|xmit|rcv")
_NOTHING = re.compile(r"([\w.-]+):? (?:0(?:\.0)? ?[KMG]?B|no traffic)\b")
_SHM = re.compile(
    r"/dev/shm\b[^\n]{0,20}size (?P<size>[\d.]+[KMGT])[^\n]{0,6} used (?P<used>[\d.]+[KMGT])"
)
_ASKED = re.compile(
    r"(?i)\brequests? (?:for )?[\w./]*gpu:? (?P<wants>\d+)\b[^\n]{0,60}"
    r"\ballocatable[^\n\d]{0,40}: ?(?P<most>\d+)"
)
_QUOTA = re.compile(
    r"(?i)\brequested: [\w./]+=(?P<wants>\d+)\b[^\n]{0,80}\blimited: [\w./]+=(?P<most>\d+)"
)
_FOREIGN = re.compile(
    r"(?i)other (?:user|job|tenant|container)|not (?:one )?of (?:this|our) job|foreign"
    r"|unknown process|of job \S+"
)


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
    """An illegal access with an Xid on one device is that device's, until it comes elsewhere."""
    xids = [fact for fact in found.of("XID_31", "XID_13_69") if "pci" in fact.groups]
    devices = {(fact.line.node, bus_id(fact.groups["pci"])) for fact in xids}
    if len(devices) == 1 and len(candidate.ranks) <= 1:
        past = found.scene.repeats("illegal", "Xid 31", "Xid 13", "MMU")
        if not past or _same_device(past, next(iter(devices))[1]):
            return replace(candidate, level=NOTICE)
    return candidate


def _same_device(past: Sequence[Line], device: str) -> bool:
    return all(device in line.text.lower() for line in past)


def _one_node(candidate: Candidate, found: Found) -> Candidate:
    """What fails on one node alone while others do well is that node's set-up."""
    node = differs(candidate, found) or (
        whole_node(candidate, found) if candidate.fault in ("PERMISSION", "USER_IMPORT") else None
    )
    if node is None:
        return candidate
    domain: Domain = "host" if candidate.domain == "user_code" else candidate.domain
    return replace(candidate, domain=domain, action="restart_elsewhere", node=node,
                   why="it fails on this node and not on others")  # fmt: skip


def _missing(candidate: Candidate, found: Found) -> Candidate:
    """Where an agent saw the mount go, what was on it is missing since then."""
    nodes = {found.scene.node_of(rank) for rank in candidate.ranks} - {None}
    gone = {fact.node for fact in found.of("STALE_MOUNT") if fact.kind == "node"}
    if nodes and nodes <= gone:
        return replace(candidate, level=DEGRADED - 1, why="its mount is gone")
    return _one_node(candidate, found)


def _token(candidate: Candidate, found: Found) -> Candidate:
    """A token that ran out in a long run is fresh in a new process; one never good is not."""
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
    """The rank that calls something else than most, where the fingerprints tell; those who only
    report it are not it."""
    odd, _ = found.stuck.mismatch()
    if candidate.level != PROGRAM and not odd:
        return candidate
    return replace(candidate, ranks=frozenset(odd))


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
    """A failed save is fatal only where the process ended by it; where nobody tells how processes
    ended, an exception after which its output tells of no further step did end it."""
    ends = found.scene.ends
    ended = {end.rank for end in ends.values() if end.code != 0}
    fatal = bool(candidate.ranks & ended) or (not ends and _is_last(candidate, found))
    return replace(
        candidate, action="restart_in_place" if fatal else "continue",
        level=PROGRAM if fatal else NOTICE, survivable=not fatal,
    )  # fmt: skip


def _is_last(candidate: Candidate, found: Found) -> bool:
    raised = {fact.line.signal: fact.line.order for fact in candidate.facts if fact.message}
    later = any(
        line.order > raised.get(line.signal, line.order) for line in found.scene.index.about("loss")
    )
    return bool(raised) and not later and not found.scene.alive and not found.scene.over


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
        seen, all_of_them = _counted(fact.line.text)
        if seen is None or all_of_them is None or seen < all_of_them:
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


def _counted(text: str) -> tuple[int | None, int | None]:
    """How many devices there are, and how many there should be."""
    if found := re.search(r"(\d+) of (\d+) GPU", text):
        return int(found[1]), int(found[2])
    if found := re.search(r"(?i)expected (\d+) (?:GPU|device)\D{0,30}(\d+)", text):
        return int(found[2]), int(found[1])
    return None, None


def _pairs(candidate: Candidate, found: Found) -> Candidate:
    """Rule 9 for pairs of cards: one node in every failing pair is at fault."""
    scene = found.scene
    pairs: list[set[str]] = [
        {m["a"], m["b"]} for line in scene.past for m in _PAIR.finditer(line.text)
        if m["a"] in scene.nodes and m["b"] in scene.nodes
    ]  # fmt: skip
    here = {fact.node for fact in candidate.facts} | {
        scene.node_at(fact.groups["address"])
        for fact in candidate.facts
        if "address" in fact.groups
    }
    here.discard(None)
    common = set.intersection(*pairs) if pairs else set()
    if here:
        common = {node for node in common if node in here}
    if len(pairs) >= 2 and len(common) == 1:
        node = common.pop()
        own = _on(candidate.facts, scene.ranks_of(node))
        return replace(candidate, action="restart_elsewhere", node=node, ranks=own,
                       why="it is one end of every failing pair")  # fmt: skip
    return replace(candidate, ranks=frozenset(), node=None)


def _slow_path(candidate: Candidate, found: Found) -> Candidate:
    """No traffic at all of one node is no slow path but a dead one."""
    scene = found.scene
    still = {
        told[1]
        for line in scene.lines
        if line.source in ("agent", "gpu", "kernel") and _TRAFFIC.search(line.text)
        for told in _NOTHING.finditer(line.text)
        if told[1] in scene.nodes
    }
    if len(still) != 1:
        return replace(candidate, ranks=frozenset(), node=None)
    node = still.pop()
    return replace(
        candidate, action="restart_elsewhere", node=node, ranks=frozenset(scene.ranks_of(node)),
        survivable=False, why="its traffic stands still while that of others does not",
    )  # fmt: skip


def _port(candidate: Candidate, found: Found) -> Candidate:
    """The ranks of the node that met the port's errors, all of it where none tells. A port that
    goes down twice is no flap that the transport outlives."""
    if not found.scene.ends and _up_again(candidate, found):
        return replace(candidate, level=NOTICE, survivable=True)
    met = [fact for fact in found.of("IB_LINK_DOWN", "IB_CQE_ERR") if fact.line.rank is not None]
    downs = Counter(fact.rank for fact in candidate.facts)
    return replace(
        candidate,
        ranks=_on(met, found.scene.ranks_of(candidate.node)) or candidate.ranks,
        survivable=candidate.survivable and max(downs.values(), default=0) < 2,
    )


def _up_again(candidate: Candidate, found: Found) -> bool:
    """Whether each port that went down is said to be up in a later line of the same signal."""
    ups = [line for line in found.scene.lines if _UP.search(line.text)]
    return all(
        any(
            up.signal == fact.line.signal
            and up.order > fact.line.order
            and set(_PORT.findall(up.text)) & set(_PORT.findall(fact.line.text))
            for up in ups
        )
        for fact in candidate.facts
    )


def _hot(candidate: Candidate, found: Found) -> Candidate:
    """Heat that slows no rank down is only noted."""
    slow = straggler_in(found.scene.index.about("compute"))
    return replace(candidate, survivable=slow is None)


def _bus_error(candidate: Candidate, found: Found) -> Candidate:
    """A bus error while /dev/shm has room is another crash of native code."""
    told = [fact for fact in candidate.facts if fact.line.source != "exit"]
    rooms = [m for line in found.scene.lines for m in _SHM.finditer(line.text)]
    free = rooms and all(_bytes(m["used"]) < 0.8 * _bytes(m["size"]) for m in rooms)
    if told or not free:
        return candidate
    known = found.catalog.known["NATIVE_CRASH"]
    return replace(
        candidate, fault="NATIVE_CRASH", domain=known.domain or "framework", action=known.action,
        why="a bus error while /dev/shm has room",
    )  # fmt: skip


def _no_room(candidate: Candidate, found: Found) -> Candidate:
    """What asks for more than any node or the quota has will never fit."""
    for line in found.scene.lines:
        for form in (_ASKED, _QUOTA):
            for told in form.finditer(line.text):
                if int(told["wants"]) > int(told["most"]):
                    return replace(candidate, action="stop", why="it asks for more than there is")
    return candidate


def _bytes(text: str) -> float:
    return float(text[:-1]) * 1024.0 ** "KMGT".index(text[-1].upper())


def _on(facts: Sequence[Fact], ranks: tuple[int, ...]) -> frozenset[int]:
    """Those of the ranks that the facts are of."""
    return frozenset(fact.rank for fact in facts if fact.rank is not None and fact.rank in ranks)


def _cancelled(candidate: Candidate, found: Found) -> Candidate:
    """Slurm ends a step also since one of its tasks failed: then nobody cancelled it."""
    step = all("*** STEP" in fact.line.text for fact in candidate.facts)
    failed = any(end.code > 0 or (end.signal and end.signal not in (INT, KILL, TERM))
                 for end in found.scene.ends.values())  # fmt: skip
    return replace(candidate, level=0) if step and failed and candidate.level < PEER else candidate


CLASS_RULES: dict[str, Callable[[Candidate, Found], Candidate]] = {
    "USER_CANCEL": _cancelled,
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
    "GPU_THERMAL": _hot,
    "SIGBUS_SHM": _bus_error,
    "UNSCHEDULABLE_QUOTA": _no_room,
    "DATA_MISSING": _missing,
    "ROCE_ECMP_SLOW": _slow_path,
}
