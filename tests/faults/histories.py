"""A job that lives in adversarial ways, and the log of what was really done to it.

The world keeps time, claims and the truth; agents know only what an agent would. Nothing here asks
the code under test what is allowed: the oracles of test_budget read the truth alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import msgspec

from everstep.core.ids import Point
from everstep.faults.budget import cause_of
from everstep.faults.decide import Response, begin, fall, respond
from everstep.faults.history import (
    AttemptFacts,
    DecisionRecord,
    IncidentRecord,
    Record,
    RecoveryPoint,
    Stamp,
    WordRecord,
    next_sequence,
)
from everstep.faults.limits import Limits
from everstep.faults.records import Verdict
from everstep.faults.situation import Policy, Situation

VERDICTS: dict[str, Verdict] = {
    "exception": Verdict("USER_EXCEPTION", "user_code", "stop", (0,), confidence=0.9),
    "oom": Verdict("CUDA_OOM", "user_code", "restart_in_place", (1,), confidence=0.9),
    "data": Verdict("DATA_CORRUPT", "user_data", "restart_in_place", (1,), confidence=0.9),
    "nccl": Verdict("NCCL_WATCHDOG_TIMEOUT", "communication", "restart_in_place", (1,)),
    "gpu": Verdict(
        "XID_79", "gpu_hardware", "restart_elsewhere", (1,), "n1", "gpu", confidence=0.9
    ),
    "nan": Verdict("NAN_INF", "numerical", "rollback", (0,), confidence=0.9),
    "throttle": Verdict("OBJ_THROTTLE", "storage", "wait_and_retry", root_domain="service"),
    "unknown": Verdict("UNKNOWN_ROOT", "unknown", "restart_in_place"),
    "victims": Verdict("GLOO_CONN_CLOSED", "communication", "restart_in_place", victim_ranks=(0,)),
    "preempted": Verdict("PREEMPTED", "scheduler", "wait_and_retry", confidence=0.9),
}
PROGRAM = {"exception", "oom", "data"}
UNCHARGED = {"victims", "preempted"}


@dataclass(frozen=True)
class Op:
    """How one attempt goes. ``source`` is what it goes on from, ``steps`` how far it comes,
    ``at`` the step that it fails at (None: the one after the last finished). ``crash`` is where
    the agent dies. ``intruder``: a second agent takes the job over meanwhile; ``race``: the first
    decides without having seen what that one wrote. ``gap``: seconds until the job is submitted
    again."""

    fault: str = "exception"
    source: str = "store"
    steps: int = 0
    commits: bool = False
    at: int | None = None
    told: bool = True
    lasted: float = 10.0
    useful: float = 0.0
    crash: str = ""
    intruder: bool = False
    race: bool = False
    closed: bool = True
    closes: bool = True
    becomes: str = ""
    falls: bool = False
    offline: bool = False
    jump: float = 0.0
    gap: float = 1.0
    host: str = "node"
    reset: bool = False


@dataclass
class Begun:
    attempt: int
    at: float


@dataclass
class Ended:
    """The truth about one attempt's end; ``fault`` is ``killed`` where its agent was."""

    attempt: int
    at: float
    fault: str
    step: int
    restored: int
    furthest: int
    committed: int
    useful: float
    provisional: bool
    late: bool = False
    """The verdict came when the next attempt was begun already."""


class Died(Exception):
    """The agent is dead."""


@dataclass
class World:
    policy: Policy
    spares: tuple[str, ...] = ()
    records: list[Record] = field(default_factory=list)
    claims: int = 0
    now: float = 0.0
    begun: list[Begun] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    segments: list[tuple[list[Begun], list[Ended]]] = field(default_factory=list)
    refusals: int = 0
    decisions: list[DecisionRecord] = field(default_factory=list)
    _agents: int = 0
    _agent: str = ""
    _wall: float = 0.0
    _running: DecisionRecord | None = None
    _committed: int = -1
    _memory: int = -1
    _crash: str = ""
    _open: set[str] = field(default_factory=set)
    _useful_until: int = -1

    def play(self, ops: list[Op]) -> None:
        for op in ops:
            self._play(op)
        self.segments.append((self.begun, self.ended))

    # one attempt

    def _play(self, op: Op) -> None:
        self._crash = op.crash
        if op.reset:
            self._reset()
        try:
            if self._running is None and not self._submit(op):
                return
            self._live(op)
        except Died:
            self._lose(op)

    def _submit(self, op: Op) -> bool:
        """A new agent; whether it may run."""
        self.now += op.gap
        self._agents += 1
        self._agent, self._wall = f"agent{self._agents}", op.jump
        facts = AttemptFacts(committed=self._committed, restored=-1)
        answer = begin(self.records, self._situation(op), self.policy, self._stamp(), facts)
        self._write(answer)
        return self._carry_out(answer.decision)

    def _carry_out(self, decision: DecisionRecord) -> bool:
        if decision.stops:
            self._running = None
            self.refusals += 1
            return False
        assert decision.begins is not None
        self.now += decision.rung.delay
        self._reach("before claim")
        assert decision.begins == self.claims + 1
        self.claims += 1
        self._running = decision
        self.begun.append(Begun(self.claims, self.now))
        self._reach("after claim")
        return True

    def _live(self, op: Op) -> None:
        running, attempt = self._running, self.claims
        assert running is not None
        restored = {"store": self._committed, "memory": self._memory, "scratch": -1}[op.source]
        if running.action == "rollback" and running.rung.recovery is not None:
            restored = running.rung.recovery.point.step
        last = restored + op.steps
        if op.at is not None:
            last = max(restored, min(last, op.at - 1)) if op.at > restored else restored
        committed = last if op.commits and last > restored else -1
        new = committed > self._useful_until
        self.now += op.lasted
        self._wall += op.jump
        facts = AttemptFacts(
            restored, last, last, committed, op.lasted, op.useful * op.lasted if new else 0.0,
            op.offline,
        )  # fmt: skip
        step = op.at if op.at is not None and op.told else last + 1
        end = Ended(
            attempt, self.now, op.fault, step, restored, max(last, restored),
            -1 if op.offline else committed, 0.0 if op.offline else facts.useful,
            running.incident in self._open,
        )  # fmt: skip
        self._committed = max(self._committed, committed)
        self._memory = max(self._memory, last)
        if op.crash == "running":
            self.ended.append(self._killed(attempt))
            raise Died
        self.ended.append(end)
        if end.committed > self._useful_until and not end.provisional:
            self._useful_until = end.committed
        seen = list(self.records), self._situation(op)
        if op.intruder:
            self._intrude(op)
        self._fail(op, facts, attempt, *(seen if op.race else (self.records, self._situation(op))))

    def _fail(
        self, op: Op, facts: AttemptFacts, attempt: int, past: list[Record], situation: Situation
    ) -> None:
        verdict = VERDICTS[op.fault]
        step = op.at if op.told else None
        verdict = msgspec.structs.replace(
            verdict,
            step=step,
            message=f"[rank{attempt % 3}]: lost 0x{attempt:04x} on {op.host}{attempt} at 12:00:01",
            frame=f"/scratch/run-{attempt}/src/train.py:12 step",
        )
        incident = IncidentRecord(
            f"{self._agent}-{attempt}", attempt, self._stamp(), verdict,
            cause=cause_of(verdict), facts=facts, closed=op.closed,
            nodes={f"{op.host}{attempt}": (0, 1)},
        )  # fmt: skip
        if not op.closed:
            self._open.add(incident.id)
        answer = respond(past, incident, situation, self.policy, self._stamp())
        self._write(answer)
        if self.claims > attempt:  # fenced: it sees the higher claim and ends
            self._running = None
            return
        if self._carry_out(answer.decision):
            self._go_on(op, incident, answer.decision)

    def _go_on(self, op: Op, incident: IncidentRecord, decision: DecisionRecord) -> None:
        """What may still come once the next attempt runs: a better verdict, or no new step."""
        if op.becomes:
            better = msgspec.structs.replace(
                incident, revision=2, verdict=replace_step(VERDICTS[op.becomes], incident.verdict),
                closed=op.closes, cause=cause_of(VERDICTS[op.becomes]),
            )  # fmt: skip
            if op.closes:
                self._open.discard(incident.id)
            ended = next(e for e in self.ended if e.attempt == incident.attempt)
            ended.fault, ended.late = op.becomes, True
            answer = respond(self.records, better, self._situation(op), self.policy, self._stamp())
            self._write(answer)
            if answer.decision.action == "continue":
                return
            self._end_by_everstep("moved")
            self._carry_out(answer.decision)
        elif op.falls:
            self.now += decision.rung.timeout
            answer = fall(self.records, decision, self._situation(op), self.policy, self._stamp())
            self._write(answer)
            self._end_by_everstep("fell")
            self._carry_out(answer.decision)

    def _end_by_everstep(self, how: str) -> None:
        self.ended.append(Ended(self.claims, self.now, how, -1, -1, -1, -1, 0.0, False))

    def _intrude(self, op: Op) -> None:
        """Another agent starts while this one runs, and takes the job over."""
        mine, self._agent = self._agent, f"{self._agent}x"
        facts = AttemptFacts(committed=self._committed)
        answer = begin(self.records, self._situation(op), self.policy, self._stamp(), facts)
        self._write(answer)
        self._carry_out(answer.decision)
        if not answer.decision.stops:
            # It dies in its turn, and the one that it fenced tells of its own end too late.
            self.ended[-1].late = True
            self.ended.append(self._killed(self.claims))
        self._agent = mine

    def _lose(self, op: Op) -> None:
        if self.ended and not self._told(self.ended[-1].attempt):
            self.ended[-1] = self._killed(self.ended[-1].attempt)  # nobody can know how it went
        if self.begun and (not self.ended or self.ended[-1].attempt < self.claims):
            self.ended.append(self._killed(self.claims))
        self._running = None
        self.now += op.gap

    def _killed(self, attempt: int) -> Ended:
        return Ended(attempt, self.now, "killed", -1, -1, -1, -1, 0.0, False)

    def _told(self, attempt: int) -> bool:
        own = (r for r in self.records if isinstance(r, IncidentRecord) and r.attempt == attempt)
        return any(r.cause != "agent_lost" for r in own)

    # what an agent does

    def _write(self, answer: Response) -> None:
        self._reach("before write")
        for record in answer.records:
            self.records.append(record)
            self._reach(f"after {type(record).__name__}")
        self.decisions.append(answer.decision)
        again = [r for r in self.records if isinstance(r, DecisionRecord)]
        assert answer.decision in again, "recorded before it is begun (F6)"

    def _reach(self, place: str) -> None:
        if place == self._crash:
            self._crash = ""
            raise Died

    def _reset(self) -> None:
        attempt = self.claims
        self.segments.append((self.begun, self.ended))
        self.begun, self.ended = [], []
        by = Stamp(f"person{attempt}", self.now, self.now, "boot")
        place = next_sequence(self.records, attempt)
        self.records.append(WordRecord("reset-budget", attempt, by, place, reason="fixed"))

    def _situation(self, op: Op) -> Situation:
        points = tuple(
            RecoveryPoint(Point(step, 1), healthy=True)
            for step in range(max(0, self._committed - 3), self._committed + 1)
        )
        nodes = tuple(f"{op.host}{i}" for i in range(2))
        return Situation(nodes, self.spares, checkpoints=points, highest_claim=self.claims)

    def _stamp(self) -> Stamp:
        return Stamp(self._agent, self.now + self._wall, self.now, "boot")


def replace_step(verdict: Verdict, like: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, step=like.step, message=like.message, frame=like.frame)


def repeat(op: Op, times: int, **changes: object) -> list[Op]:
    return [replace(op, **changes) for _ in range(times)]  # type: ignore[arg-type]


CRASHES = (
    "running", "before write", "after IncidentRecord", "after DecisionRecord", "before claim",
    "after claim",
)  # fmt: skip


def alone(**one: object) -> Policy:
    """A policy in which one budget alone has an end, so that no other hides it."""
    endless = Limits(None, None, None, None, same_step=10**6, same_step_program=10**6)
    return Policy(limits=msgspec.structs.replace(endless, **one))


POLICIES = (
    Policy(limits=Limits(window_restarts=12, window_seconds=2000.0)),
    alone(window_restarts=5, window_seconds=1000.0),
    alone(per_fingerprint=2),
    alone(no_progress=3),
    alone(same_step=3, same_step_program=2),
    Policy(limits=Limits(window_restarts=6, window_seconds=600.0), mode="off"),
)


def draw_history(seed: int) -> tuple[Policy, tuple[str, ...], list[Op]]:
    """An adversary with a character of its own: few failures that keep coming, at steps that stay
    or move, more or less useful, in a world that is more or less in order."""
    draw = random.Random(seed)
    faults = draw.sample(sorted(VERDICTS), draw.randint(1, 3))
    disorder = draw.choice([0.0, 0.0, 0.1, 0.4])
    commits, useful = draw.choice([0.0, 0.5, 1.0]), draw.choice([0.0, 0.15, 0.25, 1.0])
    moving = draw.choice([0.0, 0.3, 1.0])
    longest, furthest = draw.choice([2, 6]), draw.choice([2, 12])
    sources = draw.choice([["store"], ["memory"], ["scratch"], ["store", "memory", "scratch"]])

    def odd() -> bool:
        return draw.random() < disorder

    def one() -> Op:
        return Op(
            fault=draw.choice(faults),
            source=draw.choice(sources),
            steps=draw.randint(0, longest),
            commits=draw.random() < commits,
            at=None if draw.random() < moving else draw.randint(0, furthest),
            told=not odd(),
            lasted=draw.choice([0.0, 10.0, 400.0]),
            useful=useful,
            crash=draw.choice(CRASHES) if odd() else "",
            intruder=odd(),
            race=draw.random() < 0.5,
            closed=not odd(),
            closes=not odd(),
            becomes=draw.choice(sorted(VERDICTS)) if odd() else "",
            falls=odd(),
            offline=odd(),
            jump=draw.choice([1e5, -1e5]) if odd() else 0.0,
            gap=draw.choice([0.0, 1.0, 300.0]),
            host=draw.choice(["node", "new-host"]),
            reset=odd() and odd(),
        )

    spares = draw.choice([(), ("s1", "s2")])
    return draw.choice(POLICIES), spares, [one() for _ in range(30)]
