"""All facts of an incident: lines matched, exceptions given their class, asides left out.

Owns: which exceptions are the program's own, what only mentions a fault, the span of the failure.
Never does: I/O, weigh facts. Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import defaultdict

import msgspec

from everstep.faults.apart import set_apart
from everstep.faults.candidates import Found
from everstep.faults.catalog import Catalog, Meaning
from everstep.faults.collective import stuck_in
from everstep.faults.earlier import earlier
from everstep.faults.lines import Line
from everstep.faults.match import Fact
from everstep.faults.scene import Scene
from everstep.faults.survival import waited
from everstep.faults.tracebacks import Raised, raised_in

_NOISE = re.compile(
    r"(?:Warning|ChildFailedError|SignalException|SystemExit|KeyboardInterrupt|GeneratorExit"
    r"|ProcessExitedException|ProcessRaisedException|CalledProcessError|TERMINATE)$"
)


_KILLED = re.compile(
    r"(?i)DataLoader worker \(pids?\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly"
    r"|is killed by signal: (?:Killed|Terminated|Hangup|Interrupt))"
    r"|actor died|worker (?:died|crashed)|was killed|process \d+ terminated with|/tmp/pymp-"
)
"""Messages of exceptions that only tell of another process's end."""


_WELL = re.compile(r"(?i)\b(?:ok|healthy|passed|complete|readable|succeeds?|within limits)\b\W*$")


_QUIET = re.compile(
    r"^\[?[WID]\d{3,4} |^\[W |^\[?(?:INFO|DEBUG|WARNING|WARN|TRACE)\b"
    r"|(?:^|[^L] |[^ ])\b(?:INFO|DEBUG|WARNING|WARN)\b ?[:\]|-]"
    r"|(?i:\bretry(?:ing)?\b|\bwill be retried\b|(?:User|Future|Deprecation|Runtime)Warning)"
)


_NO_MATTER = re.compile(
    r"(?i)\b(?:ignored|ignoring|handled|continuing|dropped|falling back|fall back|recovered)\b"
    r"|\bskipp(?:ed|ing)\b|\(optional\)|^\s*(?:#|other jobs?\b)|\btests?/\S+::"
    r"|^(?:\w+ )?(?:config(?:uration)?|arg(?:ument)?s)\s*[:=]\s*[{(]|\bNamespace\("
)
"""Without a traceback: what the program goes on after, comments, names of tests, options."""


_PEER = re.compile(
    r"(?:DistBackendError|DistNetworkError|DistStoreError|DistError|Rendezvous\w+|BrokenPipeError"
    r"|ConnectionResetError|ConnectionAbortedError|ConnectionRefusedError|EOFError)$"
)


_CUDA = re.compile(
    r"(?i)\b(?:CUDA|HIP) (?:driver )?error\b|CUDNN_STATUS|CUBLAS_STATUS|\bNCCL\b|gloo|ProcessGroup"
    r"|TCPStore|\bc10d\b"
    r"|^(?:Socket Timeout|Broken pipe|Connection (?:reset|refused|closed|timed out))"
)


def gathered(scene: Scene, catalog: Catalog) -> Found:
    """Match all lines, and give exceptions their class."""
    everything, source = raised_in(scene.lines, scene.index.about("traceback"))
    mute = source | {(each.line.signal, each.line.order) for each in everything if each.ignored}
    raised = [each for each in everything if not each.ignored]
    matched = [
        fact for fact in scene.index.facts() if (fact.line.signal, fact.line.order) not in mute
    ]
    told = [
        fact
        for fact in _with_exceptions(matched, raised, catalog.meanings["USER_EXCEPTION"])
        if not _is_aside(fact) and not _is_over(fact, scene.recovered)
    ]
    facts, aside = set_apart(told, raised, scene)
    return Found(
        scene, catalog, facts, raised, _span(facts, scene),
        earlier(scene.past + scene.commits, catalog),
        stuck_in(scene.index.about("collective")), aside,
    )  # fmt: skip


def _with_exceptions(facts: list[Fact], raised: list[Raised], own: Meaning) -> list[Fact]:
    """Facts on the lines of exceptions know their frame; exceptions without a fact are the
    program's ``own``, unless they speak of communication."""
    known = list(facts)
    at: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, fact in enumerate(known):
        at[fact.line.signal, fact.line.order].append(number)
    extra: list[Fact] = []
    for each in raised:
        line = each.line
        near = [
            number
            for order in range(line.order, line.order + 6)
            for number in at.get((line.signal, order), ())
            if known[number].rank == line.rank
        ]
        for number in near:
            known[number] = msgspec.structs.replace(
                known[number], frame=each.frame, message=_said(each)
            )
        if not near and not _NOISE.search(each.name) and not _of_peers(each):
            extra.append(Fact(own, line, frame=each.frame, message=_said(each)))
    return known + extra


def _is_over(fact: Fact, recovered: list[Line]) -> bool:
    """Whether an agent's watch said later that what it had told of is well again."""
    line = fact.line
    if line.source != "agent" or not line.text.startswith(("mount watch: ", "disk watch: ")):
        return False
    return any(
        each.node == line.node
        and (each.time or 0.0) >= (line.time or 0.0)
        and each.text.partition(": ")[2].partition(" is well again")[0].partition(": there")[0]
        in line.text
        for each in recovered
    )


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
    if fact.kind != "program":
        return False
    spoken = fact.line.source == "log" and not fact.frame
    if spoken and not fact.survivable and fact.fault != "NAN_INF" and _NO_MATTER.search(text):
        return True
    if fact.message:
        return False
    if fact.line.source == "agent":
        return _WELL.search(text) is not None
    exempt = fact.survivable or fact.fault == "NAN_INF" or fact.line.source != "log"
    return not exempt and _QUIET.search(text) is not None


def _span(facts: list[Fact], scene: Scene) -> tuple[float, float] | None:
    """When it failed: from the first to the last end or error, less the time that was waited."""
    times = [end.time for end in scene.ends.values() if end.code != 0 and end.time is not None]
    for fact in facts:
        if fact.kind in ("program", "peer", "watchdog") and fact.line.time is not None:
            times += [fact.line.time, fact.line.time - waited(fact.line.text)]
    for beat in scene.beats:
        if beat.time is not None and beat.age >= 60:
            times.append(beat.time - beat.age)
    return (min(times), max(times)) if times else None
