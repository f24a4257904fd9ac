"""What flows from a failure to an action: signal, incident, verdict.

Owns: the records and their enumerations. Never does: I/O, clocks, decisions. Called by: the rest of
this room, the agent that makes signals, and the commands that read and show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Source = Literal[
    "log", "kernel", "exit", "kubernetes", "slurm", "gpu", "heartbeat", "steptime", "stack", "agent"
]
Domain = Literal[
    "user_code", "user_data", "framework", "communication", "gpu_hardware", "host", "network",
    "storage", "scheduler", "numerical", "unknown",
]  # fmt: skip
Action = Literal[
    "restart_in_place", "restart_elsewhere", "wait_and_retry", "rollback", "stop", "continue"
]
Role = Literal["root", "victim", "noise"]
Severity = Literal["fatal", "degraded", "notice"]
RootDomain = Literal["rank", "gpu", "node", "pod", "service", "path", ""]
UNKNOWN = "UNKNOWN_ROOT"


class Signal(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observation. ``rank`` and ``node`` are None where they are not known (a launcher, a
    service). ``time`` is seconds since the attempt's start by the writer's own clock, ``mono``
    seconds of CLOCK_MONOTONIC of the host that saw it, ``wall`` seconds since the epoch by that
    host's clock: for people who compare it with other logs, and never an order, as wall clocks
    jump and differ between hosts. ``exit_code`` only for the end of a process:
    negative is a signal, 128+n one that was seen through a shell. ``ours`` says that everstep sent
    the signal that this is the effect of (F2)."""

    source: Source
    text: str = ""
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    mono: float | None = None
    wall: float | None = None
    exit_code: int | None = None
    ours: bool = False


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signals of one failure, in no order. ``nodes`` gives the ranks of each node, as far as
    they are known; ``pods`` the rack, switch or pod that a node stands in; ``addresses`` the node
    of an IP address, since messages of peers name nothing else."""

    id: str
    signals: tuple[Signal, ...]
    nodes: Mapping[str, tuple[int, ...]] = {}
    addresses: Mapping[str, str] = {}
    pods: Mapping[str, str] = {}


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact that the verdict rests on: the line that matched, and what it says. ``role`` is what
    it was judged to be, ``why`` the reason in words."""

    text: str
    source: Source
    fault: str = ""
    role: Role = "noise"
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    why: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """What the incident was. ``fault`` is the class (``class`` in JSON). ``root_ranks`` are those
    on which it acted first, empty where it lies outside the ranks, is common to all, or is unknown;
    ``root_node`` is None unless evidence ties it to one. ``confidence`` is from 0 to 1, in the
    steps of :mod:`everstep.faults.confidence`. ``advice``
    is what a person should do. ``step`` is the training step at which it happened, where known,
    and ``frame`` the program's frame (file:line function); neither is part of what it was."""

    fault: str = msgspec.field(name="class")
    domain: Domain
    action: Action
    root_ranks: tuple[int, ...] = ()
    root_node: str | None = None
    root_domain: RootDomain = ""
    victim_ranks: tuple[int, ...] = ()
    confidence: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    discarded: tuple[Evidence, ...] = ()
    advice: str = ""
    frame: str = ""
    step: int | None = None
    message: str = ""
