"""Candidates among ranks that wait: whom do peers, watchdogs and stacks point at.

Owns: the order of that evidence. Never does: I/O, choose against other levels. Called by:
:mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import Counter

from everstep.faults.candidates import (
    NODE,
    NOTICE,
    OUTLIER,
    PEER,
    SIGNAL,
    WATCHDOG,
    Candidate,
    Found,
)
from everstep.faults.exits import ABORT
from everstep.faults.match import Fact
from everstep.faults.peers import Vote, vote
from everstep.faults.programs import of_end
from everstep.faults.series import odd_sum_in, silent_in, spike_in, straggler_in
from everstep.faults.stacks import Stack, outliers

_NAMES = ("NCCL_REMOTE_ERROR", "GLOO_CONN_CLOSED")
_NO_STEP = re.compile(r"^no step (?:boundary )?for \d+ s\b")
_TOLD = re.compile(r"\((rank \d.*)\)")
_ABSENT = re.compile(
    r"(?i)\b(?:absent|missing|not joined|did not join|waiting for|no news of)[:,]? (?:agents? "
    r"|nodes? |of )*(?P<node>[\w.-]+)"
)


def stack_candidates(found: Found) -> list[Candidate]:
    """The outlier of the stacks, or a single process that stands in an abort."""
    stacks = found.stacks
    aborting = [stack for stack in stacks if stack.aborts]
    if aborting and len(aborting) <= max(1, len(stacks) // 2):
        return [_of_stacks(found, "ABORT_HANG", aborting, "its stack stands in the abort")]
    late = silent_in(found.scene.beats)
    apart = outliers(stacks) or [
        stack for stack in stacks if stack.rank in late and stack.frames and not stack.waits
    ]
    if not apart:
        return []
    fault = "STORAGE_STALL" if all(stack.stores for stack in apart) else "HANG_APP"
    why = f"its stack stands at {apart[0].where} while the others wait in a collective"
    return [_of_stacks(found, fault, apart, why)]


def _of_stacks(found: Found, fault: str, stacks: list[Stack], why: str) -> Candidate:
    facts = [found.fact(fault, stack.line) for stack in stacks]
    return found.made(
        fault, OUTLIER, facts, ranks=frozenset(stack.rank for stack in stacks), why=why
    )


def collective_candidates(found: Found) -> list[Candidate]:
    """Stuck collectives: a mismatch, a rank that did not join, a watchdog that is stuck itself."""
    scene = found.scene
    stuck = found.stuck
    made: list[Candidate] = []
    odd, differs = stuck.mismatch()
    odd = odd or _odd_stack(found)
    timeouts = found.of("NCCL_WATCHDOG_TIMEOUT", "COLLECTIVE_MISMATCH")
    if differs:
        made.append(
            found.made("COLLECTIVE_MISMATCH", OUTLIER, timeouts, ranks=frozenset(odd),
                       why="ranks called different operations under one number")
        )  # fmt: skip
    culprits, why = stuck.culprits(scene.world)
    beats = found.of("NCCL_HEARTBEAT")
    if beats:
        ranks = frozenset(stuck.gil if stuck.gil and len(stuck.gil) < len(stuck.heard) else ())
        level = WATCHDOG + 1 if not timeouts or ranks else WATCHDOG - 5
        made.append(found.made("NCCL_HEARTBEAT", level, beats, ranks=ranks, why=why))
    if not culprits and (silent := silent_in(scene.beats)) and timeouts:
        culprits, why = silent, "its heartbeat stands outside the collective"
    recorded = [line for line in scene.index.about("collective")
                if line.source == "agent" and "light recorder" in line.text]  # fmt: skip
    if culprits and (timeouts or stuck.missing or recorded):
        facts = timeouts or [
            found.fact("NCCL_WATCHDOG_TIMEOUT", line)
            for line in recorded or scene.lines
            if recorded or "missing" in line.text.lower()
        ]
        made.append(
            found.made("NCCL_WATCHDOG_TIMEOUT", WATCHDOG, facts, ranks=frozenset(culprits), why=why)
        )
    made += _barrier(found, stuck.barrier)
    return made


def _odd_stack(found: Found) -> set[int]:
    """The few whose program stands elsewhere than the others', though all wait in collectives."""
    stacks = found.stacks
    shapes = Counter(stack.shape for stack in stacks).most_common()
    if len(shapes) < 2 or shapes[0][1] <= len(stacks) / 2:
        return set()
    return {stack.rank for stack in stacks if stack.shape != shapes[0][0]}


def noted_candidates(found: Found) -> list[Candidate]:
    """What a watchdog or a monitor says in words: a slow path, a straggler, an abort that hangs;
    and notes of the program itself."""
    notes = [fact for fact in found.facts if fact.severity == "notice" and fact.kind != "node"]
    made = [found.made(fact.fault, NOTICE, [fact], action=fact.meaning.action, depth=fact.depth,
                       survivable=True) for fact in notes]  # fmt: skip
    for fault in ("ROCE_ECMP_SLOW", "STRAGGLER", "LOSS_SPIKE", "ABORT_HANG"):
        facts = found.of(fault)
        if facts:
            level = {"fatal": OUTLIER, "degraded": WATCHDOG - 1, "notice": NOTICE}[
                facts[0].severity
            ]
            ranks = frozenset(fact.rank for fact in facts if fact.rank is not None)
            made.append(found.made(fault, level, facts, ranks=ranks))
    return made


def signal_candidates(found: Found) -> list[Candidate]:
    """The weakest evidence: an interrupt, a mount that is late."""
    facts = [fact for fact in found.facts if fact.kind == "signal"
             and fact.fault != "SIGTERM_EXTERNAL"]  # fmt: skip
    return [
        found.made(fact.fault, SIGNAL, [fact], ranks=fact.ranks, **fact.traits)
        for fact in facts
    ]  # fmt: skip


def _barrier(found: Found, named: set[int]) -> list[Candidate]:
    facts = found.of("GLOO_TIMEOUT")
    if not facts:
        return []
    ranks = named or silent_in(found.scene.beats) or {
        rank for fact in facts if (address := fact.groups.get("address"))
        for rank in found.scene.ranks_of(found.scene.node_at(address))
    }  # fmt: skip
    if not ranks:
        return []
    return [
        found.made("GLOO_TIMEOUT", WATCHDOG, facts, ranks=frozenset(ranks),
                   why="a barrier or a connection names it")
    ]  # fmt: skip


def told_candidates(found: Found) -> list[Candidate]:
    """A hang that an agent tells of, with the ranks that it found apart from the others."""
    lines = [line for line in found.scene.lines
             if line.source == "agent" and _NO_STEP.search(line.text)]  # fmt: skip
    ranks = frozenset(
        int(rank) for line in lines
        for told in _TOLD.findall(line.text) for rank in re.findall(r"\brank (\d+)", told)
    )  # fmt: skip
    if not ranks or len(ranks) * 2 > max(found.scene.world, 1):
        return []
    facts = [found.fact("HANG_APP", line) for line in lines]
    return [found.made("HANG_APP", WATCHDOG - 1, facts, ranks=ranks, why="an agent found it apart")]


def beat_candidates(found: Found) -> list[Candidate]:
    """Nothing but heartbeats: one rank stands elsewhere while others wait in a collective."""
    silent = silent_in(found.scene.beats)
    lines = [line for line in found.scene.lines
             if line.source == "heartbeat" and line.rank in silent]  # fmt: skip
    if not lines:
        return []
    facts = [found.fact("HANG_APP", line) for line in lines]
    return [
        found.made("HANG_APP", WATCHDOG - 1, facts, ranks=frozenset(silent),
                   why="its heartbeat stands outside the collective that the others wait in")
    ]  # fmt: skip


def series_candidates(found: Found) -> list[Candidate]:
    """Figures that stand out: the loss, one rank's step time."""
    made: list[Candidate] = []
    if spike := spike_in(found.scene.index.about("loss")):
        action = "rollback" if spike.lasting else "continue"
        made.append(
            found.made("LOSS_SPIKE", WATCHDOG - 2 if spike.lasting else NOTICE,
                       [found.fact("LOSS_SPIKE", spike.line)], action=action,
                       why=f"the loss jumped at step {spike.step}")
        )  # fmt: skip
    if odd := odd_sum_in(found.scene.index.about("checksum")):
        line, ranks = odd
        made.append(
            found.made("SDC", NODE, [found.fact("SDC", line)], ranks=frozenset(ranks),
                       why="its replica has another checksum than all others")
        )  # fmt: skip
    if slow := straggler_in(found.scene.index.about("compute")):
        made.append(
            found.made("STRAGGLER", NOTICE + 1, [found.fact("STRAGGLER", slow.line)],
                       ranks=frozenset((slow.rank,)), node=found.scene.node_of(slow.rank),
                       why=f"it computes {slow.times:.2f} times as long as the median")
        )  # fmt: skip
    return made


def peer_candidates(found: Found) -> list[Candidate]:
    """Errors of communication, with the peer that most of them name."""
    scene = found.scene
    facts = [fact for fact in found.facts if fact.kind == "peer"]
    waiting = {node for fact in found.of("GLOO_TIMEOUT")
               if (node := fact.node or scene.node_of(fact.rank)) is not None}  # fmt: skip
    votes = vote([fact for fact in facts if fact.fault in _NAMES], scene, frozenset(waiting))
    made: list[Candidate] = []
    for fault in sorted({fact.fault for fact in facts}):
        own = [fact for fact in facts if fact.fault == fault]
        if fault in _NAMES:
            made += _named(found, fault, votes)
        elif fault == "STORE_LOST":
            ranks = _of_store(found, vote(own, scene))
            made.append(found.made(fault, PEER, own, ranks=ranks, **_deepest(own)))
        elif fault in ("RDZV_TIMEOUT", "DNS_BOOTSTRAP"):
            made.append(found.made(fault, PEER, own, node=_absent(found, fault), **_deepest(own)))
        else:
            ranks = frozenset(f.rank for f in own if f.rank is not None)
            made.append(found.made(fault, PEER, own, ranks=ranks, **_deepest(own)))
    return made + _early(found, votes)


def _deepest(facts: list[Fact]) -> dict[str, object]:
    """Depth, action and domain of the most specific of the facts."""
    best = max(facts, key=lambda fact: fact.depth)
    return {"depth": best.depth, "action": best.meaning.action, "domain": best.meaning.domain}


def _named(found: Found, fault: str, votes: Vote | None) -> list[Candidate]:
    facts = found.of(fault)
    if votes is not None and votes.tied:
        return []
    ranks = _of_vote(found, votes)
    depth = max(fact.depth for fact in facts)
    why = f"{len(votes.voters)} ranks name {votes.node or votes.address}" if votes else ""
    return [found.made(fault, PEER, facts, ranks=ranks, depth=depth, why=why)]


def _of_store(found: Found, votes: Vote | None) -> frozenset[int]:
    """The store's host, where it is one rank's node or one of its ranks ended by itself."""
    if votes is None or votes.tied or votes.node is None:
        return frozenset()
    return _of_vote(found, votes)


def _of_vote(found: Found, votes: Vote | None) -> frozenset[int]:
    """The ranks of the node that was named: those that ended by themselves, else the only one."""
    scene = found.scene
    ended = frozenset(
        end.rank for end in scene.ends.values()
        if end.code != 0 and end.signal != ABORT and end.rank not in scene.ours
    )  # fmt: skip
    if votes is None or votes.node is None:
        quiet = ended - {fact.rank for fact in found.facts if fact.kind == "peer"}
        return quiet if votes is None and len(quiet) == 1 else frozenset()
    ranks = frozenset(scene.ranks_of(votes.node))
    if own := (ended & ranks) - votes.voters:
        return own
    return ranks if len(ranks) == 1 else frozenset()


def _early(found: Found, votes: Vote | None) -> list[Candidate]:
    """A rank that left with code 0 while its peers still called collectives (uneven input)."""
    scene = found.scene
    errors = [fact for fact in found.facts if fact.kind == "peer" and fact.line.time is not None]
    if not errors or scene.over or votes is None or votes.tied:
        return []
    first = min(fact.line.time for fact in errors if fact.line.time is not None)
    left = [
        end for end in scene.ends.values()
        if end.code == 0 and end.time is not None and end.time <= first + 1.0
        and end.rank not in votes.voters and votes.node in (None, scene.node_of(end.rank))
    ]  # fmt: skip
    if not left or len(left) >= max(scene.world / 2, 1.1):
        return []
    facts = [of_end(found, "COLLECTIVE_MISMATCH", end) for end in left]
    return [
        found.made("COLLECTIVE_MISMATCH", OUTLIER, facts, ranks=frozenset(end.rank for end in left),
                   why="it left with code 0 while its peers issued further collectives")
    ]  # fmt: skip


def _of_pod(name: str, found: Found) -> str | None:
    """The node of a pod whose name does not resolve, where Kubernetes or an agent speaks of it."""
    short = name.split(".")[0]
    nodes = {line.node for line in found.scene.lines
             if line.source in ("kubernetes", "agent") and line.node and not short[:1].isdigit()
             and re.search(rf"\b{re.escape(short)}\b", line.text)}  # fmt: skip
    return nodes.pop() if len(nodes) == 1 else None


def _absent(found: Found, fault: str) -> str | None:
    """The node that did not come: named as absent, or the one that refuses connections."""
    scene = found.scene
    named: set[str] = set()
    for line in scene.lines:
        if fault == "RDZV_TIMEOUT" and (told := _ABSENT.search(line.text)):
            named |= {told["node"]} if told["node"] in scene.nodes else set()
    for fact in found.of(fault):
        address = fact.groups.get("address", "")
        node = scene.node_at(address) or _of_pod(address, found) if address else None
        named |= {node} if node else set()
    return named.pop() if len(named) == 1 else None
