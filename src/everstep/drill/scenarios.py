"""What can go wrong, as data: how each kind of fault is brought about, and what has to follow.

Owns: the kinds of the matrix with their expectations. Never does: I/O, judge. Called by: matrix,
trial (to inject), examine (to judge), cli and tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from everstep.core import exits
from everstep.core.points import Fault
from everstep.errors import UsageError
from everstep.faults.records import Action

Outside = Literal["", "oom", "store-down", "clock-jump", "node-lost", "rendezvous-lost",
                  "partition"]  # fmt: skip
"""What the drill itself does to a run, from without; "" where a point in a process does it."""
Root = Literal["victim", "nobody", "node"]
Then = Literal["resumes", "stops", "goes on"]
Needs = Literal["", "mounts", "networks"]
"""Namespaces that a kind must be allowed to make."""

SNAPSHOT_EVERY = 5
"""Steps between snapshots in a run of the matrix."""
HANG_FLOOR = 10.0
HANG_SECONDS = 20.0


class Expectation(msgspec.Struct, frozen=True):
    """What the job's own records and events have to say.

    ``faults``: the classes that are right for each incident, more than one only for the reason in
    ``why``. ``actions``: what the verdict may ask for. ``root``: whom it names: the rank (or the
    node) that was struck, or nobody; of an unknown cause nobody in any case (F1). ``then``: how it
    ends, with the exit code of the job. ``attempts``: how many there are at least and at most.
    ``identical``: bit for bit what an undisturbed run comes to (R4). ``rollback``: steps are given
    up back to the newest healthy checkpoint; else no committed step is lost. ``within``: seconds
    from the fault to the first step after it."""

    faults: tuple[str, ...]
    actions: tuple[Action, ...]
    root: Root = "victim"
    then: Then = "resumes"
    exit_code: int = exits.FINISHED
    attempts: tuple[int, int] = (2, 2)
    identical: bool = True
    rollback: bool = False
    within: float = 60.0
    why: str = ""


class Scenario(msgspec.Struct, frozen=True):
    """One kind of fault. ``point`` and ``action`` are those of :mod:`everstep.core.points`, for one
    rank or for ``every`` one, at a step (``at_step``, else in the snapshot before it), once in the
    run (``once``) or in each attempt. ``outside`` is what the drill does instead. ``settings`` are
    more variables of ``everstep run``."""

    kind: str
    about: str
    expect: Expectation
    point: str = ""
    action: str = ""
    once: bool = True
    every: bool = False
    at_step: bool = True
    outside: Outside = ""
    nodes: int = 1
    needs: Needs = ""
    settings: tuple[tuple[str, str], ...] = ()


class Drawn(msgspec.Struct, frozen=True):
    """What a seed picks: the rank (with several nodes: the node) and the step."""

    rank: int
    step: int


_AT_BOUNDARY = "train.step.before_boundary"
_HANG = (("EVERSTEP_HANG_FLOOR", str(HANG_FLOOR)),)
_AGED_AT_ONCE = (("EVERSTEP_DETECTION_DELAY", "0.5"),)
"""A run of some seconds has no checkpoint that is older than the default of 10 s."""
_HANGS = Expectation(
    ("HANG_APP", "NCCL_WATCHDOG_TIMEOUT"), ("restart_in_place",), within=HANG_SECONDS,
    why="stacks show where the rank stands, or the flight recorder that it never joined",
)  # fmt: skip
_KILLED = Expectation(
    ("GLOO_CONN_CLOSED", "UNKNOWN_ROOT"), ("restart_in_place",),
    why="nobody says who sent a SIGKILL: a peer's word of the lost connection is all there may be",
)  # fmt: skip
_LOST = Expectation(
    ("NODE_NOT_READY", "GLOO_CONN_CLOSED", "STORE_LOST", "UNKNOWN_ROOT"),
    ("restart_elsewhere", "restart_in_place", "wait_and_retry"), root="node",
    attempts=(2, 3), within=90.0,
    why="what the one node that is left can know of the other depends on which sign comes first",
)  # fmt: skip

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "exception", "a Python exception on one rank, at the same step each time",
        Expectation(("USER_EXCEPTION",), ("stop",), then="stops", exit_code=exits.REPEATED),
        _AT_BOUNDARY, "error:ValueError", once=False,
    ),
    Scenario(
        "exception-once", "a Python exception on one rank, once",
        Expectation(("USER_EXCEPTION",), ("stop",)), _AT_BOUNDARY, "error:RuntimeError",
    ),
    Scenario(
        "exit-1", "all ranks end with exit code 1 and no word, once",
        Expectation(("UNKNOWN_ROOT",), ("restart_in_place",), root="nobody"),
        _AT_BOUNDARY, "exit:1", every=True,
    ),
    Scenario(
        "segv", "SIGSEGV of one rank, once",
        Expectation(("NATIVE_CRASH",), ("restart_in_place",)), _AT_BOUNDARY, "segv",
    ),
    Scenario(
        "segv-always", "SIGSEGV of one rank, at the same step each time",
        Expectation(
            ("NATIVE_CRASH",), ("restart_in_place",), then="stops", exit_code=exits.REPEATED,
            attempts=(3, 3),
        ),
        _AT_BOUNDARY, "segv", once=False,
    ),
    Scenario(
        "shm-full", "SIGBUS of one rank: /dev/shm is full (a private mount of 1 MiB)",
        Expectation(("SIGBUS_SHM",), ("stop",), then="stops", exit_code=exits.REPEATED),
        _AT_BOUNDARY, "bus", once=False, needs="mounts",
    ),
    Scenario(
        "oom", "SIGKILL of one rank, and the kernel's line of a memory kill",
        Expectation(("HOST_OOM_KILL",), ("restart_in_place",)), outside="oom",
    ),
    Scenario(
        "hang-collective", "one rank stops before a collective that the others stand in",
        _HANGS, _AT_BOUNDARY, "hang", settings=_HANG,
    ),
    Scenario(
        "hang-loader", "one rank stops where it fetches a batch",
        _HANGS, "train.data.before_batch", "hang", settings=_HANG,
    ),
    Scenario(
        "hang-save", "one rank stops in the middle of a snapshot",
        _HANGS, "train.cut.begun", "hang", at_step=False, settings=_HANG,
    ),
    Scenario(
        "nan-once", "the gradients of one step are NaN, once",
        Expectation(("NAN_INF",), ("rollback",), root="nobody", rollback=True),
        "train.step.gradients", "nan", settings=_AGED_AT_ONCE,
    ),
    Scenario(
        "nan-always", "the gradients of one step are NaN each time it is computed",
        Expectation(
            ("NAN_INF",), ("rollback",), root="nobody", then="stops", exit_code=exits.REPEATED,
            rollback=True,
        ),
        "train.step.gradients", "nan", once=False, settings=_AGED_AT_ONCE,
    ),
    Scenario(
        "store-down", "the store fails for a minute, and one rank is killed meanwhile",
        _KILLED, outside="store-down",
    ),
    Scenario(
        "clock-jump", "the agent's wall clock jumps back by an hour, then one rank is killed",
        _KILLED, "core.clock.wall", "shift:-3600", outside="clock-jump",
    ),
    Scenario(
        "node-lost", "SIGKILL of agent, keeper and workers of the second node; started again",
        _LOST, outside="node-lost", nodes=2,
    ),
    Scenario(
        "rendezvous-lost", "the same for the node that holds the rendezvous",
        _LOST, outside="rendezvous-lost", nodes=2,
    ),
    Scenario(
        "partition", "the network between two nodes is cut for 20 s",
        _LOST, outside="partition", nodes=2, needs="networks",
    ),
)  # fmt: skip

KINDS = tuple(scenario.kind for scenario in SCENARIOS)


def chosen(kinds: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios of ``kinds``, all where none is named. Raises :class:`UsageError`."""
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(
                f"{kind!r} is no kind of the matrix.", hint=f"One of {', '.join(KINDS)}."
            )
    return tuple(one for one in SCENARIOS if not kinds or one.kind in kinds)


def draw(scenario: Scenario, seed: int, between: tuple[int, int]) -> Drawn:
    """The rank, and the step ``between`` these, that ``seed`` picks."""
    rng = random.Random(f"{seed}/{scenario.kind}")
    rank = {"node-lost": 1, "rendezvous-lost": 0}.get(scenario.outside, rng.randrange(2))
    return Drawn(rank, rng.randint(*between))


def armed(scenario: Scenario, drawn: Drawn, folder: Path) -> list[Fault]:
    """What ``EVERSTEP_FAULTS`` says in this run; files of it go into ``folder``."""
    if not scenario.point:
        return []
    outside = bool(scenario.outside)
    ranks = [None] if outside or not (scenario.every and scenario.once) else [0, 1]
    return [
        Fault(
            scenario.point,
            scenario.action,
            # Of points that know no step the passes are counted: one in each snapshot.
            after=0 if outside or scenario.at_step else drawn.step // SNAPSHOT_EVERY - 1,
            rank=drawn.rank if rank is None and not (outside or scenario.every) else rank,
            step=drawn.step if scenario.at_step and not outside else None,
            once=str(folder / f"once-{rank}") if scenario.once and not outside else None,
            during=str(folder / "during") if outside else None,
            told=str(told(folder)),
        )
        for rank in ranks
    ]


def told(folder: Path) -> Path:
    """Where points tell that they went off."""
    return folder / "went-off"
