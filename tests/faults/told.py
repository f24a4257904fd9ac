"""Short words for histories in tests: verdicts, incidents, and an agent that writes them down."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from everstep.core.ids import Point
from everstep.faults.budget import cause_of
from everstep.faults.decide import Response, begin, fall, respond
from everstep.faults.fold import History, fold
from everstep.faults.history import (
    AttemptFacts,
    DecisionRecord,
    IncidentRecord,
    Record,
    RecoveryPoint,
    Stamp,
    Word,
    WordRecord,
    next_sequence,
)
from everstep.faults.records import Verdict
from everstep.faults.situation import Policy, Situation

FOUR = ("a", "b", "c", "d")
GPU = Verdict(
    "XID_79", "gpu_hardware", "restart_elsewhere", (2,), "b", "gpu", confidence=0.95, step=10,
    message="fell off the bus",
)  # fmt: skip
SOFT = msgspec.structs.replace(GPU, fault="XID_94", action="restart_in_place", message="contained")
EXCEPTION = Verdict(
    "USER_EXCEPTION", "user_code", "stop", (1,), confidence=0.9, step=10,
    message="ZeroDivisionError: division by zero", frame="/job/train.py:7 loss",
    advice="Guard the division.",
)  # fmt: skip
TIMEOUT = Verdict(
    "NCCL_WATCHDOG_TIMEOUT", "communication", "restart_in_place", (1,), confidence=0.8, step=10,
    message="watchdog caught a collective",
)  # fmt: skip
NAN = Verdict(
    "NAN_INF", "numerical", "rollback", (0,), "a", "rank", confidence=0.9, step=10,
    message="loss is nan",
)  # fmt: skip
UNKNOWN = Verdict("UNKNOWN_ROOT", "unknown", "restart_in_place", step=10)


def verdict(like: Verdict, **changes: object) -> Verdict:
    return msgspec.structs.replace(like, **changes)


def points(*steps: int, healthy: bool = True) -> tuple[RecoveryPoint, ...]:
    return tuple(RecoveryPoint(Point(step, 1), "store", healthy) for step in steps)


@dataclass
class Agent:
    """One agent that does as it is told, on a clock of its own."""

    policy: Policy = field(default_factory=Policy)
    situation: Situation = field(default_factory=lambda: Situation(FOUR))
    pods: dict[str, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    now: float = 0.0
    claims: int = 0
    last: DecisionRecord | None = None

    def start(self, facts: AttemptFacts | None = None) -> DecisionRecord:
        return self._take(begin(self.records, self._here(), self.policy, self.stamp(), facts))

    def fails(self, of: Verdict, after: float = 100.0, **changes: object) -> DecisionRecord:
        """The attempt that runs ends by ``of``; started first where none runs."""
        if self.last is None:
            self.start()
        self.now += after
        incident = self.incident(of, **changes)
        return self.tells(incident)

    def incident(self, of: Verdict, **changes: object) -> IncidentRecord:
        made = IncidentRecord(
            f"i{self.claims}", self.claims, self.stamp(), of, cause=cause_of(of), pods=self.pods,
            facts=AttemptFacts(restored=0, reached=9, finished=9, lasted=100.0),
            nodes={node: (i,) for i, node in enumerate(self.situation.nodes)},
        )  # fmt: skip
        return msgspec.structs.replace(made, **changes)

    def tells(self, incident: IncidentRecord) -> DecisionRecord:
        return self._take(respond(self.records, incident, self._here(), self.policy, self.stamp()))

    def falls(self) -> DecisionRecord:
        assert self.last is not None
        self.now += self.last.rung.timeout
        return self._take(fall(self.records, self.last, self._here(), self.policy, self.stamp()))

    def says(self, word: Word, subject: str = "", reason: str = "") -> None:
        place = next_sequence(self.records, self.claims)
        self.records.append(WordRecord(word, self.claims, self.stamp(), place, subject, reason))

    def history(self, after: float = 0.0) -> History:
        self.now += after
        return fold(self.records, highest_claim=self.claims, now=self.stamp())

    def stamp(self) -> Stamp:
        return Stamp("agent", 1000.0 + self.now, self.now, "boot")

    def _here(self) -> Situation:
        return msgspec.structs.replace(self.situation, highest_claim=self.claims)

    def _take(self, answer: Response) -> DecisionRecord:
        self.records += answer.records
        self.last = answer.decision
        if self.last.begins is not None:
            self.claims = self.last.begins
            if self.last.rung.nodes:
                self.situation = msgspec.structs.replace(
                    self.situation,
                    nodes=self.last.rung.nodes,
                    spares=tuple(n for n in self.situation.spares if n not in self.last.rung.nodes),
                )
        return self.last
