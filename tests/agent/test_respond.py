"""What follows an attempt, where evidence comes late (F3, F6)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from everstep.agent import respond
from everstep.agent.agree import combine
from everstep.agent.incident import Case
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import NodeEnd, NodeEntry, Plan
from everstep.agent.respond import Responder
from everstep.core import exits
from everstep.errors import NonFinite
from everstep.faults.catalog import load
from everstep.faults.history import DecisionRecord, IncidentRecord, Record, Stamp
from everstep.faults.records import Signal
from everstep.faults.situation import Policy

OOM = "Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB"
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=77, name=python3, GPU has fallen off the bus."


@dataclass
class Written:
    """A chronicle in memory; every record in the order in which it was written."""

    records: list[Record] = field(default_factory=list)
    offline: bool = False
    highest_claim: int = 1
    now: float = 0.0

    def stamp(self) -> Stamp:
        self.now += 1.0
        return Stamp("job-host-1-abcd", self.now, self.now, "boot")

    def read(self) -> tuple[Record, ...]:
        return tuple(self.records)

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)

    def of(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records if isinstance(record, kind)]


def responder(written: Written, patience: float = 2.0) -> Responder:
    return Responder(
        written,  # type: ignore[arg-type]  # a chronicle in all that is asked of it
        Recorder("job", stream=io.StringIO()),
        Policy(),
        agent="job-host-1-abcd",
        patience=patience,
        catalog=load,
        points=lambda: (),
        draw=lambda: 0.0,
    )


def killed(spares: int = 0, attempt: int = 1) -> Case:
    """Rank 1, on node b with pid 77, was killed by a signal that nobody here sent."""
    exits_ = (
        Signal("exit", "rank 1 pid 77 killed by signal 9 (SIGKILL)", 1, exit_code=-9, mono=9.0,
               time=9.0),
    )  # fmt: skip
    ends = {
        0: NodeEnd(workers=((0, -9, True),), attached=True, steps={0: 4}, finished=4),
        1: NodeEnd(workers=((1, -9, False),), attached=True, steps={1: 4}, signals=exits_),
    }
    plan = Plan(nodes=(NodeEntry("default", 1, "a"), NodeEntry("default", 1, "b")), attempt=attempt)
    return Case(plan, ends, combine(ends, 2), began=0.0, failed=9.0, spares=spares)


def test_the_first_symptom_is_the_earliest_step_of_which_a_rank_says_so() -> None:
    written = Written()
    case = killed()
    ends = dict(case.ends)
    for rank, step in ((0, 12), (1, 11)):
        error = NonFinite.at(rank=rank, step=step, figure="loss", value=float("nan"))
        text = f"Traceback (most recent call last):\neverstep.errors.NonFinite: {error}"
        said = (Signal("log", text, rank, mono=9.0, time=9.0),)
        ends[rank] = NodeEnd(workers=((rank, 1, False),), attached=True, signals=said)
    case = replace(case, ends=ends, end=combine(ends, 2))
    responder(written, patience=0.0).answer(case, lambda _: ())
    (incident,) = written.of(IncidentRecord)
    assert isinstance(incident, IncidentRecord)
    assert (incident.verdict.fault, incident.where) == ("NAN_INF", 12)
    assert incident.first_symptom == 11
    told = Written()
    responder(told, patience=0.0).answer(killed(), lambda _: ())
    (other,) = told.of(IncidentRecord)
    assert isinstance(other, IncidentRecord)
    assert other.first_symptom is None


def test_a_late_line_of_the_kernel_moves_the_attempt_off_the_node_that_it_blames() -> None:
    written = Written()
    told = responder(written)
    first = told.answer(killed(spares=1), lambda _: ())
    assert first.action == "restart"
    assert first.record is not None
    assert (first.record.rung.action, first.record.provisional) == ("restart_in_place", True)
    written.highest_claim = 2
    late = told.settle((Signal("kernel", XID, node="b", time=9.1, mono=9.1),))
    assert late is not None
    assert late.record is not None
    assert (late.record.rung.action, late.record.begins) == ("restart_elsewhere", 3)
    assert "b" not in late.record.rung.nodes
    incidents = written.of(IncidentRecord)
    assert [(i.revision, i.closed) for i in incidents] == [(1, False), (2, True)]  # type: ignore[union-attr]  # incidents


def test_evidence_that_changes_nothing_leaves_the_attempt_alone() -> None:
    written = Written()
    told = responder(written)
    told.answer(killed(), lambda _: ())
    written.highest_claim = 2
    assert told.settle(()) is None
    assert told.open is None
    last = written.records[-1]
    assert isinstance(last, DecisionRecord)
    assert last.action == "continue"


def test_a_stop_waits_for_the_evidence_that_is_on_its_way() -> None:
    """Without it, the same failure would have come a third time (F4); with it, what stops the job
    is that it gets no further, and a person reads that memory was short."""
    written = Written()
    told = responder(written)
    for attempt in (1, 2):
        decision = told.answer(killed(attempt=attempt), lambda _: ())
        assert decision.action == "restart"
        written.highest_claim = attempt + 1
    asked: list[float] = []

    def more(seconds: float) -> tuple[Signal, ...]:
        asked.append(seconds)
        return (Signal("kernel", OOM, node="b", time=9.2, mono=9.2),)

    stopped = told.answer(killed(attempt=3), more)
    assert len(asked) == 1
    incident = written.of(IncidentRecord)[-1]
    assert isinstance(incident, IncidentRecord)
    assert (incident.verdict.fault, incident.closed) == ("HOST_OOM_KILL", True)
    assert stopped.exit_code == exits.NO_PROGRESS


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_an_end_that_is_no_failure_is_recorded_as_such(end: str) -> None:
    """F3: it is charged to nobody, and the next start finds no attempt without an end."""
    written = Written()
    told = responder(written)
    case = killed()
    over = replace(
        case.end,
        workers=(),
        finished=end == "finished",
        stopped_by=15 if end != "finished" else None,
    )
    decision = told.answer(replace(case, end=over), lambda _: ())
    assert decision.exit_code == (exits.FINISHED if end == "finished" else exits.PREEMPTED)
    again = told.begin(("a", "b"), None)
    assert again.action == "restart"
    assert not written.of(IncidentRecord)


def test_an_error_of_the_judge_costs_the_verdict_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a log that nobody has thought of")

    monkeypatch.setattr(respond, "judge", fails)
    written = Written()
    decision = responder(written).answer(killed(), lambda _: ())
    assert decision.action == "restart"
    (incident,) = written.of(IncidentRecord)
    assert isinstance(incident, IncidentRecord)
    assert (incident.verdict.fault, incident.verdict.root_ranks) == ("UNKNOWN_ROOT", ())
