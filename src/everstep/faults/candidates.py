"""Facts into candidates: what may be the root, on which ranks and node, and how strong that is.

Owns: how facts of a class come together, places, the levels of evidence. Never does: I/O, choose.
Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from everstep.faults.catalog import Catalog, Place
from everstep.faults.collective import Stuck, stuck_in
from everstep.faults.earlier import Earlier, earlier
from everstep.faults.exits import ABORT, BUS, CRASHES, KILL, TERM, End
from everstep.faults.lines import Line
from everstep.faults.match import Fact, facts_of
from everstep.faults.records import Action, Domain
from everstep.faults.scene import Scene
from everstep.faults.tracebacks import Raised, raised_in

NODE, PROGRAM, OUTLIER, DEGRADED, PEER, WATCHDOG, SIGNAL, NOTICE = 50, 40, 36, 35, 30, 20, 10, 5
"""Levels of evidence: kind before time (rule 1)."""
_LEVEL = {"node": NODE, "program": PROGRAM, "peer": PEER, "watchdog": WATCHDOG, "signal": SIGNAL}
BEFORE_S, AFTER_S = 600.0, 300.0
"""How far from the failure a fact of a node still belongs to it."""

_WIDE = frozenset(("job", "service", "switch", "node"))
"""Places that are no single rank's."""
_NOISE = re.compile(
    r"(?:Warning|ChildFailedError|SignalException|SystemExit|KeyboardInterrupt|GeneratorExit"
    r"|ProcessExitedException|ProcessRaisedException|StopIteration|CalledProcessError|TERMINATE)$"
)
_KILLED = re.compile(
    r"(?i)DataLoader worker \(pids?\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly|is killed by signal: (?:Killed|Terminated|Hangup|Interrupt))"
    r"|actor died|worker (?:died|crashed)|was killed|process \d+ terminated with|/tmp/pymp-"
)
"""Messages of exceptions that only tell of another process's end."""
_WELL = re.compile(
    r"(?i)\b(?:ok|healthy|passed|complete|readable|succeeds?|within limits)\b\W*$"
)
_QUIET = re.compile(
    r"^\[?[WID]\d{3,4} |^\[W |^\[?(?:INFO|DEBUG|WARNING|WARN|TRACE)\b"
    r"|(?:^|[^L] |[^ ])\b(?:INFO|DEBUG|WARNING|WARN)\b ?[:\]|-]"
    r"|(?i:\bretry(?:ing)?\b|\bwill be retried\b|(?:User|Future|Deprecation|Runtime)Warning)"
)
_PEER = re.compile(
    r"(?:DistBackendError|DistNetworkError|DistStoreError|DistError|Rendezvous\w+|BrokenPipeError"
    r"|ConnectionResetError|ConnectionAbortedError|ConnectionRefusedError|EOFError)$"
)
_CUDA = re.compile(
    r"(?i)\bCUDA (?:driver )?error\b|CUDNN_STATUS|CUBLAS_STATUS|\bNCCL\b|gloo|ProcessGroup|TCPStore|\bc10d\b"
    r"|^(?:Socket Timeout|Broken pipe|Connection (?:reset|refused|closed|timed out))"
)
_RAN = re.compile(
    r"ran for (\d+) milliseconds|Timed out waiting (\d+)ms|within (\d+)ms|in (\d+) ?ms\b"
)


@dataclass(frozen=True)
class Candidate:
    """What may be the root: its place, its facts, and the earliest time of them."""

    fault: str
    domain: Domain
    action: Action
    level: int
    place: Place
    depth: int
    facts: tuple[Fact, ...]
    ranks: frozenset[int] = frozenset()
    node: str | None = None
    why: str = ""
    survivable: bool = False
    nodes: frozenset[str] = frozenset()
    pod: str = ""

    @property
    def time(self) -> float | None:
        times = [fact.line.time for fact in self.facts if fact.line.time is not None]
        return min(times) if times else None

    @property
    def order(self) -> tuple[float, int]:
        """Where it begins: by time; within one signal by line."""
        return min(
            ((fact.line.time if fact.line.time is not None else 0.0, fact.line.order)
             for fact in self.facts), default=(0.0, 0),
        )  # fmt: skip


@dataclass
class Found:
    """All facts of an incident, sorted by what they are for."""

    scene: Scene
    catalog: Catalog
    facts: list[Fact] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    span: tuple[float, float] | None = None
    past: Earlier = field(default_factory=lambda: Earlier(frozenset(), {}, False))
    stuck: Stuck = field(default_factory=Stuck)

    def of(self, *faults: str) -> list[Fact]:
        return [fact for fact in self.facts if fact.fault in faults]

    def made(self, fault: str, level: int, facts: Iterable[Fact], **more: object) -> Candidate:
        """A candidate of a class with the class's defaults."""
        known = self.catalog.known[fault]
        assert known.domain is not None, "a loaded class has its file's domain"
        base = Candidate(
            fault, known.domain, known.action, level, known.place, known.depth, tuple(facts),
            survivable=known.survivable,
        )  # fmt: skip
        return replace(base, **more)  # type: ignore[arg-type]

    def fact(self, fault: str, line: Line) -> Fact:
        """A fact of a class that no pattern of a line showed."""
        known = self.catalog.known[fault]
        assert known.domain is not None, "a loaded class has its file's domain"
        return Fact(
            fault, known.domain, known.action, known.kind, known.place, known.severity, known.role,
            known.depth, known.survivable, line,
        )  # fmt: skip


def find(scene: Scene, catalog: Catalog) -> Found:
    """Match all lines, and give exceptions their class."""
    found = Found(scene, catalog, facts_of(scene.lines, catalog), raised_in(scene.lines))
    ignored = {(raised.line.signal, raised.line.order) for raised in found.raised if raised.ignored}
    found.facts = [fact for fact in found.facts
                   if (fact.line.signal, fact.line.order) not in ignored]  # fmt: skip
    found.raised = [raised for raised in found.raised if not raised.ignored]
    found.facts = [fact for fact in _with_exceptions(found) if not _is_aside(fact)]
    found.span = _span(found)
    found.past = earlier(scene.past + scene.commits, catalog)
    found.stuck = stuck_in(scene.lines)
    return found


def node_candidates(found: Found) -> list[Candidate]:
    """Facts of nodes, kernels and schedulers, one candidate for each class and node."""
    groups: dict[tuple[str, str | None], list[Fact]] = defaultdict(list)
    for fact in found.facts:
        if fact.kind == "node" and _belongs(fact, found):
            groups[fact.fault, _node_of(fact, found.scene)].append(fact)
    return [_node_candidate(fault, node, facts, found) for (fault, node), facts in groups.items()]


def program_candidates(found: Found) -> list[Candidate]:
    """Ends of processes that are no trouble of communication: one candidate for each class."""
    best: dict[int | None, Fact] = {}
    lived: list[Fact] = []
    for fact in found.facts:
        if fact.kind != "program" or fact.severity == "notice":
            continue
        if _survived(fact, found.scene):
            lived.append(fact)
            continue
        old = best.get(fact.rank)
        if old is None or _key(fact) < _key(old):
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


def _signature(fact: Fact) -> str:
    """What makes errors of the program the same: type and frame, else type and text. Other classes
    say by themselves that it is one thing."""
    if fact.fault not in ("USER_EXCEPTION", "USER_ASSERT"):
        return ""
    kind, _, text = fact.message.partition(": ")
    return f"{kind} {fact.frame or re.sub(r'[0-9]+', '#', text)}"


def _lived(facts: list[Fact], found: Found) -> list[Candidate]:
    """What ranks went on after: a note, for classes that training survives."""
    return [
        replace(_program_candidate(fact.fault, [fact], found), level=NOTICE)
        for fact in facts if fact.survivable
    ]  # fmt: skip


def _weaker(fact: Fact | None, found: Found, crash: str) -> bool:
    return (
        fact is None
        or fact.depth < found.catalog.known[crash].depth
        and fact.fault == "USER_EXCEPTION"
    )


def _key(fact: Fact) -> tuple[float, float, int, str]:
    time = fact.line.time if fact.line.time is not None else 0.0
    return (-fact.depth, time, fact.line.order, fact.line.text)


def _with_exceptions(found: Found) -> list[Fact]:
    """Facts on the lines of exceptions know their frame; exceptions without a fact are the
    program's own, unless they speak of communication."""
    facts = list(found.facts)
    at: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, fact in enumerate(facts):
        at[fact.line.signal, fact.line.order].append(number)
    extra: list[Fact] = []
    for raised in found.raised:
        line = raised.line
        own = [
            number
            for order in range(line.order, line.order + 6)
            for number in at.get((line.signal, order), ())
            if facts[number].rank == line.rank
        ]
        for number in own:
            facts[number] = replace(facts[number], frame=raised.frame, message=_said(raised))
        if not own and not _NOISE.search(raised.name) and not _of_peers(raised):
            extra.append(
                replace(
                    found.fact("USER_EXCEPTION", line), frame=raised.frame, message=_said(raised)
                )
            )
    return facts + extra


def _of_peers(raised: Raised) -> bool:
    return bool(
        _PEER.search(raised.name) or _CUDA.search(raised.message) or _KILLED.search(raised.message)
    )


def _said(raised: Raised) -> str:
    return f"{raised.type}: {raised.message}" if raised.message else raised.type


def _is_aside(fact: Fact) -> bool:
    """Lines that only mention a fault of the program: a supervisor that found all well, a warning,
    a retry that may still succeed. What really ended it comes as an exception."""
    text = fact.line.text
    if fact.kind != "program" or fact.message:
        return False
    if fact.line.source == "agent":
        return _WELL.search(text) is not None
    exempt = fact.survivable or fact.fault == "NAN_INF" or fact.line.source != "log"
    return not exempt and _QUIET.search(text) is not None


def _survived(fact: Fact, scene: Scene) -> bool:
    """Whether its rank went on: it ended well, or still beats after it."""
    rank = fact.rank
    if rank is None:
        return bool(scene.ends) and not scene.dead and fact.survivable
    if rank in scene.ends:
        return scene.ends[rank].code == 0
    time = fact.line.time
    return any(
        beat.rank == rank
        and rank in scene.alive
        and (time is None or beat.time is None or beat.time > time + beat.age)
        for beat in scene.beats
    )


def _span(found: Found) -> tuple[float, float] | None:
    """When it failed: from the first to the last end or error, less the time that was waited."""
    times: list[float] = []
    for end in found.scene.ends.values():
        if end.code != 0 and end.time is not None:
            times.append(end.time)
    for fact in found.facts:
        if fact.kind in ("program", "peer", "watchdog") and fact.line.time is not None:
            waited = _RAN.search(fact.line.text)
            seconds = float(next(filter(None, waited.groups()))) / 1000 if waited else 0.0
            times += [fact.line.time, fact.line.time - seconds]
    for beat in found.scene.beats:
        if beat.time is not None and beat.age >= 60:
            times.append(beat.time - beat.age)
    return (min(times), max(times)) if times else None


def _belongs(fact: Fact, found: Found) -> bool:
    """The window of rule 1; the clock of a node that is wrong orders nothing."""
    time = fact.line.time
    if found.span is None or time is None or fact.severity == "notice":
        return True
    if any(other.node == fact.node for other in found.of("CLOCK_SKEW") if other.node):
        return True
    return found.span[0] - BEFORE_S <= time <= found.span[1] + AFTER_S


def _node_of(fact: Fact, scene: Scene) -> str | None:
    if fact.place in ("job", "service"):
        return None
    named = fact.groups.get("node")
    if named and (known := scene.node_at(named)):
        return known
    return fact.line.node or scene.node_of(fact.rank)


def _node_candidate(fault: str, node: str | None, facts: list[Fact], found: Found) -> Candidate:
    facts = sorted(facts, key=_key)
    worst = next((fact for fact in facts if fact.severity == "fatal"), None)
    chosen = worst or next((fact for fact in facts if fact.severity == "degraded"), facts[0])
    level = {"fatal": NODE, "degraded": DEGRADED, "notice": NOTICE}[chosen.severity]
    counted = [fact for fact in facts if fact.severity == chosen.severity]
    named = {rank for fact in counted if fact.place not in _WIDE
             and (rank := _named_rank(fact, node, found)) is not None}  # fmt: skip
    ranks = frozenset(named) or frozenset().union(*(_ranks_of(f, node, found) for f in counted))
    if fault == "IMAGE_PULL" or chosen.place == "job":
        node = None  # the image is the registry's, not the node's
    return found.made(
        fault, level, counted, node=node, ranks=ranks, action=chosen.action, domain=chosen.domain,
        place=chosen.place, depth=chosen.depth, survivable=chosen.survivable,
    )  # fmt: skip


def _ranks_of(fact: Fact, node: str | None, found: Found) -> frozenset[int]:
    """The ranks that a fact of a node stands on."""
    scene = found.scene
    if fact.place in ("job", "service", "switch"):
        return frozenset()
    if fact.place == "node":
        return frozenset(scene.ranks_of(node))
    rank = _named_rank(fact, node, found)
    if rank is not None:
        return frozenset((rank,))
    if fact.place == "pod":
        return frozenset(scene.ranks_of(node))
    if fact.place == "process":
        killed = {end.rank for end in scene.ends.values()
                  if end.signal == KILL and end.rank not in scene.ours
                  and (end.node or scene.node_of(end.rank)) == node}  # fmt: skip
        if killed:
            return frozenset(killed)
    return _touched(node, found)


def _named_rank(fact: Fact, node: str | None, found: Found) -> int | None:
    scene, groups = found.scene, fact.groups
    if "pci" in groups and (rank := scene.of_device(node, groups["pci"])) is not None:
        return rank
    if "pid" in groups:
        pid = int(groups["pid"])
        if (rank := scene.of_pid(node, pid)) is not None:
            return rank
        told = {
            raised.line.rank
            for raised in found.raised
            if re.search(rf"\bpid:? ?{pid}\b", raised.message)
        }
        if len(told) == 1:
            return told.pop()
    return fact.rank


def _touched(node: str | None, found: Found) -> frozenset[int]:
    """Without a map: the only rank of the node that shows anything of its own."""
    scene = found.scene
    if len(scene.ranks_of(node)) == 1:
        return frozenset(scene.ranks_of(node))
    own = {
        fact.rank for fact in found.facts
        if fact.rank is not None and fact.kind == "program"
        and (fact.line.node or scene.node_of(fact.rank)) == node
    } | {
        end.rank for end in scene.ends.values()
        if end.code != 0 and end.rank not in scene.ours and (end.node or scene.node_of(end.rank)) == node
    }  # fmt: skip
    if len(own) == 1:
        return frozenset(own)
    beats = {beat.rank for beat in scene.beats
             if beat.rank in scene.ranks_of(node) and beat.age >= 60}  # fmt: skip
    devices = {fact.rank for fact in found.of("NCCL_CUDA_ERROR", "CONFIG_INVALID", "CUDA_OOM")
               if fact.rank in scene.ranks_of(node)}  # fmt: skip
    for group in (devices, beats):
        if len(group) == 1:
            return frozenset(rank for rank in group if rank is not None)
    return frozenset()


def of_end(found: Found, fault: str, end: End) -> Fact:
    """A fact about the end of a process; a launcher's line names its rank and node in words."""
    groups = {"rank": str(end.rank)} | ({"node": end.node} if end.node else {})
    return replace(found.fact(fault, end.line), groups=groups)


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
    return found.made(
        fault, PROGRAM, facts, ranks=ranks, depth=chosen.depth, action=chosen.action,
        domain=chosen.domain, place=chosen.place, survivable=chosen.survivable,
    )  # fmt: skip


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


def external_ends(found: Found) -> list[Candidate]:
    """Ends by SIGTERM that nobody of ours sent."""
    scene = found.scene
    deaths = [end for end in scene.ends.values() if end.code != 0 and end.signal not in (TERM, ABORT)
              and end.rank not in scene.ours]  # fmt: skip
    first = min((end.time for end in deaths if end.time is not None), default=None)
    outside = [
        end for end in scene.ends.values()
        if end.signal == TERM and end.rank not in scene.ours
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


def _known(facts: list[Fact]) -> frozenset[int]:
    return frozenset(fact.rank for fact in facts if fact.rank is not None)
