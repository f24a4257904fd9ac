"""A job with a past in a store, made by the decision rules themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
from told import EXCEPTION, FOUR, GPU, Agent, verdict

from everstep.faults.history import (
    AttemptFacts,
    ProgressRecord,
    Record,
    ResultRecord,
    next_sequence,
    pack,
)
from everstep.faults.records import Evidence, Verdict
from everstep.faults.situation import Situation
from everstep.store import Job, OwnerIdentity, open_store

BEGAN = 1767607200.0
"""2026-01-05 10:00:00 UTC."""

FELL_OFF: Verdict = verdict(
    GPU, step=1204, victim_ranks=(0, 1, 3), message="GPU 0000:3b:00.0 has fallen off the bus",
    advice="Reset the GPU or replace it, then pardon the node.",
    evidence=(
        Evidence("watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, "
                 "OpType=ALLREDUCE)", "log", "NCCL_WATCHDOG_TIMEOUT", "victim", 3, "d", 1812.40),
        Evidence("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "kernel", "XID_79",
                 "root", None, "b", 1811.92, "root: the GPU of rank 2"),
    ),
    discarded=(
        Evidence("slow storage: a read took 4.1 s", "log", "", "noise", 0, "a", 640.25,
                 "too early, and training went on"),
    ),
)  # fmt: skip


def facts(restored: int, reached: int, committed: int) -> AttemptFacts:
    return AttemptFacts(restored, reached, reached, committed, lasted=100.0, useful=80.0)


def recovered() -> Agent:
    """One lost GPU, survived on a spare node from the newest checkpoint; the job runs on."""
    agent = Agent(situation=Situation(FOUR, spares=("e",)))
    agent.fails(FELL_OFF, after=1812.5, facts=facts(-1, 1203, 1150))
    agent.now += 30.0
    told = ResultRecord(
        "r1", "i1", 2, agent.stamp(), success=True, detect=0.06, decide=0.4, stop=0.31, start=2.12,
        restore=1.9, first_step=6.11, commit=12.9, new_step=1204, repeated=53, tier="store",
    )  # fmt: skip
    adds(agent, told)
    agent.now += 60.0
    return adds(agent, ProgressRecord(2, agent.stamp(), facts(1150, 1290, 1250)))


def stopped() -> Agent:
    """The same, and then the same error of the program twice."""
    agent = recovered()
    agent.fails(verdict(EXCEPTION, step=1300), facts=facts(1200, 1299, 1250))
    agent.fails(verdict(EXCEPTION, step=1300), facts=facts(1299, 1299, 1250))
    return agent


def finished() -> Agent:
    agent = recovered()
    agent.now += 600.0
    ended = "the job finished: step 2000 is committed"
    return adds(
        agent, ProgressRecord(2, agent.stamp(), facts(1203, 2000, 2000), ended=ended, finished=True)
    )


def adds(agent: Agent, record: Record) -> Agent:
    """``record`` behind all others of its attempt."""
    place = next_sequence(agent.records, record.attempt)
    agent.records.append(msgspec.structs.replace(record, sequence=place))
    return agent


def job_of(store: Path, agent: Agent, name: str = "toy") -> Job:
    """A job in a new store whose history is what ``agent`` wrote, from ``BEGAN`` on."""
    job = open_store(str(store), create=True).job(name)
    for record in agent.records:
        wall = record.at.wall - 1000.0 + BEGAN
        at = msgspec.structs.replace(record.at, wall=wall)
        job.record_history(pack(msgspec.structs.replace(record, at=at)))
    for _ in range(agent.claims):
        job.claim(OwnerIdentity("agent", "host", "another boot", 1, 1))
    return job
