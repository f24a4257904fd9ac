"""From what the nodes say of an attempt's end to what can be judged.

Owns: the incident's signals and names. Pure: records in, records out. Never does: judge
(:mod:`everstep.faults.judge`). Called by: respond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from everstep.agent.decide import AttemptEnd, WorkerEnd
from everstep.agent.line import SILENT_SECONDS
from everstep.agent.rendezvous import NodeEnd, Plan
from everstep.faults.history import AttemptFacts
from everstep.faults.records import Evidence, Incident, Signal, Verdict

SHOWN_STACKS = 4


@dataclass(frozen=True)
class Case:
    """An attempt that has ended, as the leader knows it. ``ends`` is what its nodes said, ``end``
    the same in one; ``began`` and ``failed`` are times of CLOCK_MONOTONIC here. ``spares`` are
    agents that wait to join; ``others`` gives what other nodes have seen since."""

    plan: Plan
    ends: Mapping[int, NodeEnd]
    end: AttemptEnd
    began: float
    failed: float
    spares: int = 0
    late: tuple[Signal, ...] = field(default=())
    others: Callable[[], tuple[Signal, ...]] = tuple

    @property
    def age(self) -> float:
        """Seconds for which the failure had gone on when it was seen."""
        lost = SILENT_SECONDS if self.end.lost_nodes else 0.0
        return max((said.age for said in self.ends.values()), default=lost)

    @property
    def nodes(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node, by its name."""
        return dict(zip(self.plan.names(), self.plan.ranks_of_node(), strict=True))

    @property
    def lost(self) -> tuple[str, ...]:
        names = self.plan.names()
        return tuple(names[node] for node in self.end.lost_nodes)

    @property
    def pods(self) -> dict[str, str]:
        named = zip(self.plan.names(), self.plan.nodes, strict=True)
        return {name: entry.pod for name, entry in named if entry.pod}


def incident_of(case: Case, name: str) -> Incident:
    """All signals of the attempt's end, under the names of its nodes."""
    return Incident(
        id=name,
        signals=tuple(_signals(case)),
        nodes=case.nodes,
        pods=case.pods,
        addresses=_addresses(case.plan),
    )


def facts_of(case: Case, now: float, *, offline: bool) -> AttemptFacts:
    """What the budgets are counted by. ``offline``: the store cannot be asked."""
    end = case.end
    return AttemptFacts(
        restored=end.restored,
        reached=end.reached,
        finished=end.finished_step,
        committed=end.committed,
        lasted=max(0.0, now - case.began),
        useful=max((said.useful for said in case.ends.values()), default=0.0),
        offline=offline,
        told=end.attached,
    )


def at_its_step(verdict: Verdict, case: Case) -> Verdict:
    """The verdict with the step that its root ranks were computing, which the agents know better
    than any log line: the first that those had not finished. What is no number may have been seen
    some steps late, and says itself of which step it is."""
    if verdict.domain == "numerical" and verdict.step is not None:
        return verdict
    steps = {rank: step for said in case.ends.values() for rank, step in said.steps.items()}
    roots = [steps[rank] for rank in verdict.root_ranks if rank in steps]
    if not roots and case.end.furthest < 0:
        return verdict
    done = min(roots, default=case.end.finished_step)
    return msgspec.structs.replace(verdict, step=max(done, case.end.restored) + 1)


def with_stacks(verdict: Verdict, incident: Incident) -> Verdict:
    """The verdict of a hang with what the ranks were seen to do, its roots first: the place in the
    program is what a person looks for. Each rank's newest stack."""
    newest = {one.rank: one for one in incident.signals if one.source == "stack"}
    order = sorted(newest, key=lambda rank: (rank not in verdict.root_ranks, rank or 0))
    seen = tuple(
        Evidence(
            newest[rank].text, "stack", rank=rank, node=newest[rank].node, time=newest[rank].time,
            role="root" if rank in verdict.root_ranks else "noise", why="what it was seen to do",
        )
        for rank in order[:SHOWN_STACKS]
    )  # fmt: skip
    known = {item.text for item in verdict.evidence}
    more = tuple(item for item in seen if item.text not in known)
    return msgspec.structs.replace(verdict, evidence=(*verdict.evidence, *more))


def _signals(case: Case) -> Iterator[Signal]:
    names = case.plan.names()
    for node, said in case.ends.items():
        told = {signal.rank for signal in said.signals if signal.source == "exit"}
        exits = (_exit(end) for end in said.worker_ends() if end.rank not in told)
        yield from _named((*said.signals, *exits), names[node])
    yield from case.late
    for name in case.lost:
        text = f"the agent of node {name} has shown no life for {SILENT_SECONDS:g} s"
        yield Signal("agent", text, node=name)


def _named(signals: Iterable[Signal], node: str) -> Iterator[Signal]:
    for signal in signals:
        yield signal if signal.node else msgspec.structs.replace(signal, node=node)


def _exit(end: WorkerEnd) -> Signal:
    text = f"killed by signal {-end.code}" if end.code < 0 else f"exited with code {end.code}"
    return Signal("exit", text, rank=end.rank, exit_code=end.code, ours=end.by_everstep)


def _addresses(plan: Plan) -> dict[str, str]:
    """The node of each address; one that several agents share names nobody."""
    shared = Counter(entry.address for entry in plan.nodes)
    return {
        entry.address: name
        for name, entry in zip(plan.names(), plan.nodes, strict=True)
        if entry.address and shared[entry.address] == 1
    }
