"""From a decision to workers that may start: the nodes meet, the attempt is claimed and begun.

Owns: the order meet, claim (S6), begin at the keeper; what this agent has come to know of the job
by that. Never does: decide (:mod:`everstep.agent.lead` does), start workers. Called by: the loop.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from everstep.agent.decide import AttemptEnd, Decision
from everstep.agent.ending import exit_code_of
from everstep.agent.flags import UNLIMITED, Launch
from everstep.agent.keeper import CONNECT_SECONDS, NodeKeeper
from everstep.agent.lead import Lead
from everstep.agent.line import StoreSilent
from everstep.agent.owner import Owner
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import (
    AGAIN_SECONDS,
    GATHER_SECONDS,
    LEADER_SECONDS,
    Meeting,
    NodeEntry,
    Plan,
    Round,
)
from everstep.agent.supervise import Learnt
from everstep.agent.tend import TRY_SECONDS, Tending
from everstep.agent.workers import Place
from everstep.cadence.policy import Policy
from everstep.core import exits
from everstep.core.events import counted
from everstep.core.settings import to_environment
from everstep.errors import (
    AgentError,
    AttemptLived,
    EverstepError,
    KeeperError,
)
from everstep.keeper.wire import BeginAttempt
from everstep.store import STALE_SECONDS


class Beginning:
    """Begins attempts on this node, the agent number ``index`` of its host.

    ``restarts`` are those of all attempts so far; ``reached`` says that a snapshot was complete,
    ``expected`` that a recovery point is (R5); ``took_part`` that this agent had a part in the job
    already; ``same_nodes`` that the next round is one of the nodes of the last. ``learnt`` is what
    the keeper tells of the attempt at hand."""

    def __init__(
        self,
        launch: Launch,
        index: int,
        keeper: NodeKeeper,
        tending: Tending,
        owner: Owner,
        lead: Lead,
        record: Recorder,
    ) -> None:
        self._launch = launch
        self._index = index
        self._keeper = keeper
        self._tending = tending
        self._owner = owner
        self._lead = lead
        self._record = record
        self.meeting = Meeting(launch.config)
        self.learnt = Learnt(record, lead)
        self.restarts = 0
        self.expected = self.reached = False
        self.took_part = self.same_nodes = False

    def learn(self, end: AttemptEnd) -> None:
        """What an attempt's end says of the next one."""
        self.same_nodes = not end.lost_nodes and not end.members_changed
        self.reached = self.reached or end.reached >= 0  # a complete snapshot stays in memory
        self.expected = self.expected or self.reached or end.restored >= 0

    def prepare(self) -> tuple[Round, Plan] | Decision:
        """Everything up to the start of the workers: ask the history, meet, claim (S6), begin at
        the keeper. A decision where there is nothing to start now."""
        attempt = 0
        if self.meeting.alone:  # before a keeper is started for nothing
            names = Plan(nodes=(self._entry(),)).names()
            ready = self._lead.ready(names, patience=0.0, spares=0)
            if ready.action == "stop" or ready.delay > 0:
                return ready
            attempt = self._claim_alone()
        self._record.attempt = attempt or self._record.attempt
        if not self._keeper.attached:
            self._keeper.launch()
        round_ = self._meet()
        plan = self._leads(round_, attempt) if round_.leads else self._follow(round_)
        if plan.exit_code is not None:
            return Decision("stop", plan.exit_code, plan.reason)
        if round_.node in plan.leave:
            return Decision("stop", exits.LEFT_OUT, plan.reason)
        if plan.wait is not None:
            self.same_nodes = not plan.leave
            return Decision("restart", 0, plan.reason, delay=plan.wait)
        return round_, plan

    def _claim_alone(self) -> int:
        """S6: the owner may go on from memory while the store is away. Several nodes wait for it:
        whether each still holds its part only their keepers know."""
        return self._lead.claim(patience=0.0, promise=self.reached and self._keeper.holds_memory)

    def _meet(self) -> Round:
        if self.same_nodes:
            self.same_nodes = False
            round_ = self.meeting.again()
            try:
                self._enter(round_, AGAIN_SECONDS)
            except StoreSilent:
                raise
            except AgentError:
                # An agent has died since the verdict: torch's rendezvous waits for another.
                return self._meet()
            return round_
        round_ = self.meeting.next()
        self._enter(round_, GATHER_SECONDS)
        return round_

    def _enter(self, round_: Round, timeout: float) -> None:
        round_.enter(self._entry(), keep_ranks=self.meeting.static, timeout=timeout)

    def _entry(self) -> NodeEntry:
        config, settings, host = self._launch.config, self._launch.settings, socket.gethostname()
        return NodeEntry(
            config.role, config.nproc_per_node, host, self._index,
            name=settings.node_name, pod=settings.node_pod, address=_address(host),
        )  # fmt: skip

    def _leads(self, round_: Round, attempt: int) -> Plan:
        try:
            plan = self._waits(round_) if not attempt else None
            if plan is None:
                self.meeting.refresh_port(round_)
                plan, port = self._begin_at(round_, attempt)
                plan = msgspec.structs.replace(plan, coordinator=(round_.master_addr, port))
        except EverstepError as error:
            round_.publish(Plan(exit_code=exit_code_of(error), reason=str(error)))
            raise
        round_.publish(plan)
        return plan

    def _waits(self, round_: Round) -> Plan | None:
        """The plan of a round that starts no workers: the job is stopped, has to wait, or has a
        node in it that it is to do without. None where they may start."""
        names = Plan(nodes=round_.entries).names()
        spares = self.meeting.spares()
        ready = self._lead.ready(names, patience=self._patience, spares=spares)
        if ready.action == "stop":
            return Plan(exit_code=ready.exit_code, reason=ready.reason)
        assert ready.record is not None, "what is begun was decided"
        out = self._lead.left_out(names, ready.record, spares)
        if ready.delay > 0 or out:
            return Plan(wait=ready.delay, reason=ready.reason, leave=out)
        return None

    def _begin_at(self, round_: Round, attempt: int) -> tuple[Plan, int]:
        """The plan of ``attempt``, or of the next one that can be had, begun at this node's
        keeper; and the keeper's port."""
        while True:
            plan = Plan(
                nodes=round_.entries,
                attempt=attempt or self._lead.claim(patience=self._patience),
                claimant=self._owner.id,
                restarts=self.restarts,
                expected=self.expected,
                master_addr=round_.master_addr,
                master_port=round_.master_port,
                token=secrets.token_hex(16) if round_.nodes > 1 else "",
                asked=self._lead.asked(),
            )
            try:
                return plan, self._begin(round_, plan)
            except AttemptLived:
                # The state is there, under this number: the next one goes on from it.
                attempt = 0
                self._keeper.part()

    @property
    def _patience(self) -> float:
        """Seconds for which another owner is waited for: the leader of the attempt before, where
        there was one and it is not this agent."""
        return STALE_SECONDS + LEADER_SECONDS if self.took_part else 0.0

    def _follow(self, round_: Round) -> Plan:
        self._owner.release()  # where the node that leads has changed
        self._lead.forget()
        plan = round_.plan()
        if plan.exit_code is None and plan.wait is None:
            # Known to every node, should the lead move to it.
            self.restarts = plan.restarts
            self._begin(round_, plan)
        return plan

    def _begin(self, round_: Round, plan: Plan) -> int:
        """Begin the attempt at this node's keeper; the port on which it hears other keepers."""
        self._record.attempt = plan.attempt
        self._record.at_node(round_.node)
        self.learnt = Learnt(self._record, self._lead)
        self.took_part = True
        begin = self._begin_message(round_, plan)
        try:
            self._attach()
            port = self._keeper.begin(begin).port
        except KeeperError as lost:
            if not lost.retryable:
                raise
            self._tending.lost(lost)
            self._recover(lost)
            port = self._keeper.begin(begin).port
        self._record.say(
            "attempt.started",
            f"attempt {plan.attempt}: {counted(len(plan.nodes), 'node')}, "
            f"{counted(sum(entry.workers for entry in plan.nodes), 'worker')}",
            nodes=len(plan.nodes), restarts=plan.restarts, agent_pid=os.getpid(),
        )  # fmt: skip
        return port

    def _recover(self, lost: KeeperError) -> None:
        """Another keeper, tried for as long as one may take to come up."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while not self._tending.recover():
            if time.monotonic() >= deadline:
                raise lost
            time.sleep(TRY_SECONDS)

    def _attach(self) -> None:
        if self._keeper.attached:
            return
        adopted = self._keeper.attach()
        what = "adopted" if adopted else "started"
        log = f", log {self._keeper.log}" if os.path.exists(self._keeper.log) else ""
        self._record.say(
            "keeper.started", f"keeper {what} (pid {self._keeper.pid}){log}",
            pid=self._keeper.pid, adopted=adopted,
        )  # fmt: skip

    def _begin_message(self, round_: Round, plan: Plan) -> BeginAttempt:
        settings = self._launch.settings
        return BeginAttempt(
            launch=f"attempt-{plan.attempt}",
            attempt=plan.attempt,
            node=round_.node,
            ranks_of_node=plan.ranks_of_node(),
            resume=settings.resume,
            expected=plan.expected,
            coordinator=plan.coordinator if round_.node > 0 else None,
            token=plan.token,
            policy=Policy(settings.snapshot_every, settings.checkpoint_every),
            keep_last=settings.keep_last,
            detection_delay=settings.detection_delay,
            agent=plan.claimant,
            claimed=self._owner.claimed,
            environment=_environment(),
            recover=plan.asked.recover,
            skip=plan.asked.skip,
            replay_until=plan.asked.replay_until,
            hold=plan.asked.hold,
        )

    # -- what workers are told

    def place(self, round_: Round, plan: Plan) -> Place:
        role_ranks, role_size = plan.role_ranks(round_.node)
        given = self._launch.max_restarts
        return Place(
            node=round_.node,
            nodes=round_.nodes,
            ranks=plan.ranks_of_node()[round_.node],
            role_ranks=role_ranks,
            world_size=sum(entry.workers for entry in plan.nodes),
            role_world_size=role_size,
            master_addr=plan.master_addr,
            master_port=plan.master_port,
            restarts=plan.restarts,
            max_restarts=UNLIMITED if given is None else given,
            run_id=self.meeting.run_id,
            use_agent_store=self.meeting.use_agent_store,
        )

    def worker_settings(self, round_: Round, plan: Plan, stacks: Path) -> dict[str, str]:
        own: dict[str, Any] = {
            "keeper": self._keeper.name,
            "attempt": plan.attempt,
            "node": round_.node,
            "nodes": round_.nodes,
            "ranks": ",".join(f"{ranks[0]}-{ranks[-1]}" for ranks in plan.ranks_of_node()),
            "agent_pid": os.getpid(),
            "stacks": str(stacks),
            "assumed": ",".join(sorted({"store", "job"} - self._launch.given)),
        }
        # Said even where they are the defaults: the agent's own environment may hold others.
        always = {*own, *self._launch.given}
        return to_environment(replace(self._launch.settings, **own), always)


def _address(host: str) -> str:
    """This host's address as its peers see it in messages, as far as the host itself knows."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _environment() -> dict[str, str]:
    """What R4 warns about where it changed: recorded with the attempt's branch."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
