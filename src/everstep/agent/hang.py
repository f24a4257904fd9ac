"""The watch over one attempt's ranks on this node: does the job hang, and what is the evidence.

Owns: when it is looked, the thread that looks, the evidence of a hang. Never does: decide what is
a hang (:mod:`everstep.faults.hang`), kill. Called by: supervise while workers run.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from everstep.agent.aside import aside
from everstep.agent.record import Recorder
from everstep.agent.watch.flight import Flight
from everstep.agent.watch.stacks import Sample, Stacks
from everstep.agent.watch.steps import Steps, heartbeats
from everstep.core.settings import Settings
from everstep.faults.hang import (
    Finding,
    HangPolicy,
    RankBeat,
    Standing,
    Watch,
    observe,
    standing,
)
from everstep.faults.records import Signal
from everstep.keeper.spawn import log_path

ROOM = 64 << 10
"""Bytes that a few stacks take: with less, a folder is full."""
EVIDENCE_SECONDS = 3.0
"""From a hang that is found to its end: what the ranks are seen to do is written down first."""
FLOOR_SECONDS = 30.0
"""No job is ended as hanging that has finished a step within this time, unless told otherwise."""
BLIND_SECONDS = 120.0
"""For the first rank to attach, before it is said that hangs of this job cannot be seen."""
REPEATED = 4.0
"""So many times as patient at a step at which the attempt before was ended as hanging: what takes
long there by right is let through, and a hang costs minutes once."""
MOST_PATIENT = 16.0

T = TypeVar("T")

_LOOKS_KEPT = 2
_EVERY = (0.1, 1.0)
_BUSY = 0.05


@dataclass(frozen=True)
class Hang:
    """A hang that was found: ``ranks`` of this node end no step since ``age`` s, ``culprits`` are
    those that do not merely wait; ``step`` is the last one that all had finished."""

    ranks: tuple[int, ...]
    culprits: tuple[int, ...]
    step: int
    age: float
    reason: str


@dataclass(frozen=True)
class Patience:
    """What one attempt teaches the next about waiting: the longest ``resume`` that was measured
    (seconds from the end of the workers to their successors' first step), and at which ``step`` an
    attempt was ended as hanging, how often in a row."""

    resume: float = 0.0
    step: int = -2
    times: int = 0

    def after(self, *, hung: bool, step: int, resume: float) -> Patience:
        """After an attempt that ended at ``step``, ``hung`` or otherwise."""
        longest = max(self.resume, resume)
        if hung:
            return Patience(longest, step, self.times + 1 if step == self.step else 1)
        return replace(self, resume=longest)

    def policy(self, floor: float) -> HangPolicy:
        """The policy of the next attempt; ``floor`` is the setting."""
        chosen = floor or max(FLOOR_SECONDS, self.resume)
        return HangPolicy(floor=chosen)

    def at(self, policy: HangPolicy, step: int) -> HangPolicy:
        """The policy where the ranks stand at ``step``."""
        if step != self.step or not self.times:
            return policy
        return replace(policy, floor=policy.floor * min(REPEATED**self.times, MOST_PATIENT))


class HangWatch:
    """Looks at the ranks whenever :attr:`due`. ``began`` is the attempt's start."""

    def __init__(
        self,
        *,
        steps: Steps,
        stacks: Stacks,
        flight: Flight,
        record: Recorder,
        policy: HangPolicy,
        patience: Patience,
        began: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._stacks = stacks
        self._flight = flight
        self._record = record
        self._policy = policy
        self._patience = patience
        self._began = began
        self._clock = clock
        self._watch = Watch()
        self._every = min(max(policy.floor / 20, _EVERY[0]), _EVERY[1])
        self._next = math.inf if math.isinf(policy.floor) else began
        self._looking: Future[Sample] | None = None
        self._samples: list[Sample] = []
        self._said = ""
        self._blind = False
        self.standing = Standing(excused=True)
        self.evidence: list[Signal] = []

    @property
    def due(self) -> float:
        """When :meth:`look` has something to do."""
        return self._next

    @property
    def suspects(self) -> bool:
        """Whether the ranks are looked at because they end no steps."""
        return not math.isinf(self._watch.since)

    def look(self, now: float, others: Iterable[Standing] = ()) -> Hang | None:
        """What is found at ``now``. ``others`` is how the other nodes' ranks stand."""
        if now < self._next:
            return None
        self._take_sample()
        beats = self._steps.read()
        self._say_blind(now, beats)
        policy = self._patience.at(self._policy, min((b.step for b in beats), default=-2))
        before = self.suspects
        self._watch, found = observe(self._watch, policy, now, beats, others)
        self.standing = standing(self._watch, policy, now, beats)
        self._say(found, policy, before=before)
        if not self.suspects:
            self._samples = []  # of a suspicion that is over
        if found.look and self._looking is None:
            self._looking = aside(self._stacks.look, "everstep-stacks")
        self._next = now + (_BUSY if self._looking is not None else self._every)
        return self._found(found) if found.stage == "act" else None

    def gather(self, now: float) -> None:
        """Have the evidence of a hang in :attr:`evidence` before the ranks are ended; within
        :data:`EVIDENCE_SECONDS`. Where this node had no suspicion of its own (another one had) it
        looks twice now."""
        deadline = now + EVIDENCE_SECONDS
        flight = aside(lambda: self._flight.dump(deadline), "everstep-stacks")
        while len(self._samples) < _LOOKS_KEPT and self._clock() < deadline:
            if self._looking is None:
                self._looking = aside(self._stacks.look, "everstep-stacks")
            if not _wait(self._looking, deadline - self._clock()):
                break
            self._take_sample()
        _wait(flight, deadline - self._clock())
        recorded = flight.result() if flight.done() and not flight.exception() else []
        stacks = [signal for sample in self._samples for signal in sample.signals]
        self.evidence = [*self._beats(now), *stacks, *recorded]
        self._record.say(
            "hang.evidence", f"{len(self.evidence)} signals of the hang", level="debug",
            stacks=sorted(signal.rank for signal in stacks if signal.rank is not None),
            flight=len(recorded), seconds=round(self._clock() - now, 3),
        )  # fmt: skip

    def stop(self) -> None:
        """Nothing is looked at any more: the attempt is ending."""
        self._next = math.inf

    # -- what is seen

    def _take_sample(self) -> None:
        if self._looking is not None and self._looking.done():
            sample, self._looking = self._sampled(self._looking), None
            self._samples = [*self._samples, sample][-_LOOKS_KEPT:]
            self._watch = self._watch.looked(sample.at, sample.looks)

    def _sampled(self, future: Future[Sample]) -> Sample:
        """A look that fails is none: it must not end what it looks at, and is said."""
        if error := future.exception():
            self._record.say(
                "hang.unseen", f"the ranks could not be looked at: {error!r}", level="warning"
            )
            return Sample(self._clock(), (), ())
        return future.result()

    def _found(self, found: Finding) -> Hang:
        told = ", ".join(f"rank {rank}{self._where(rank)}" for rank in found.culprits)
        return Hang(found.ranks, found.culprits, found.step, found.age, f"{found.reason} ({told})")

    def _where(self, rank: int) -> str:
        """`` in next_batch (train.py:12)``: the program's innermost frame."""
        looks = [look for sample in self._samples[-1:] for look in sample.looks]
        where = next((look.where for look in looks if look.rank == rank), "")
        return f" in {where}" if where else ""

    def _beats(self, now: float) -> list[Signal]:
        waiting = {look.rank: look.waits for sample in self._samples[-1:] for look in sample.looks}
        return heartbeats(self._steps.read(), now, now - self._began, waiting)

    # -- what is said

    def _say(self, found: Finding, policy: HangPolicy, *, before: bool) -> None:
        if found.stage == "watching":
            if before:
                self._record.say(
                    "hang.cleared", "the ranks end steps again, or say what takes long",
                    level="debug",
                )  # fmt: skip
            self._said = ""
        elif not self._said:
            self._said = "suspected"
            self._tell("hang.suspected", found, found.reason, "debug")
        elif self._said == "suspected" and self._is_let_go_on(found, policy):
            self._said = "moving"
            self._tell("hang.moving", found, _moving(found, policy), "warning")

    def _is_let_go_on(self, found: Finding, policy: HangPolicy) -> bool:
        looked = len(self._watch.looks) >= policy.samples
        return looked and found.stage == "suspect" and found.age > policy.floor

    def _tell(self, kind: str, found: Finding, text: str, level: str) -> None:
        self._record.say(
            kind, text, level="warning" if level == "warning" else "debug", step=found.step,
            ranks=list(found.ranks), age=round(found.age, 1),
        )  # fmt: skip

    def _say_blind(self, now: float, beats: tuple[RankBeat, ...]) -> None:
        """F5: what cannot be seen is said once, and judged never."""
        early = now - self._began < max(self._policy.floor, BLIND_SECONDS)
        if self._blind or early or any(beat.phase for beat in beats):
            return
        self._blind = True
        why = "no rank has attached" if beats else "no control page of this attempt is held"
        self._record.say("hang.blind", f"hangs are not seen: {why}", level="debug")
        self.evidence.append(Signal("agent", f"blind for hangs: {why}", time=now - self._began))


def stacks_folder(settings: Settings, index: int) -> Path:
    """Where the workers of agent ``index`` on this host answer."""
    return log_path(settings, index).with_suffix(".stacks")


def emptied(folder: Path) -> str:
    """Make that folder anew, for an attempt: an agent that was killed has left its own. Why it
    could not be done, else empty: then workers cannot answer, and evidence of a hang is poorer."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        (folder / "room").write_bytes(b"." * ROOM)
        (folder / "room").unlink()
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return str(error)
    return ""


def _moving(found: Finding, policy: HangPolicy) -> str:
    ranks = ", ".join(map(str, found.ranks))
    return (
        f"no step for {found.age:.0f} s on rank {ranks}, but not all stand still: they are let go "
        f"on until {policy.last(0.0):.0f} s. What takes long by right says so: "
        '`with run.long_phase("evaluation"):`'
    )


def _wait(future: Future[T], seconds: float) -> bool:
    """Whether it is done, with a result or an error, within ``seconds``."""
    return bool(wait([future], max(0.0, seconds)).done)
