"""The agent: attempt after attempt until one of them is the last.

Owns: the order of things. Never does: decide (:mod:`everstep.agent.decide`). Called by: main.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import signal
import socket
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch

from everstep.agent import agree, report, torch_events, workers
from everstep.agent.decide import AttemptEnd, Decision, History, decide
from everstep.agent.flags import UNLIMITED, Launch
from everstep.agent.keeper import CONNECT_SECONDS, NodeKeeper, claim_index, hold_index, holder_of
from everstep.agent.line import StoreSilent
from everstep.agent.owner import Owner
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import (
    AGAIN_SECONDS,
    GATHER_SECONDS,
    LEADER_SECONDS,
    Meeting,
    NodeEnd,
    NodeEntry,
    Plan,
    Round,
)
from everstep.agent.signals import Interrupted, Signals
from everstep.agent.supervise import Learnt, Supervision
from everstep.agent.tend import TRY_SECONDS, Tending
from everstep.agent.workers import Place, Workers
from everstep.cadence.policy import Policy
from everstep.core import exits, points
from everstep.core.events import counted
from everstep.core.settings import to_environment
from everstep.errors import (
    AgentError,
    AttemptLived,
    EverstepError,
    JobOwned,
    KeeperError,
    NoRecoveryPoint,
    RestoreError,
    StoreError,
)
from everstep.keeper.wire import BeginAttempt, Fatal, Report
from everstep.store import STALE_SECONDS


class Agent:
    """One call of ``everstep run`` on one node."""

    def __init__(self, launch: Launch, signals: Signals, record: Recorder) -> None:
        settings = launch.settings
        self._launch = launch
        self._signals = signals
        self._record = record
        self._history = History()
        self._expected = self._reached = False
        self._took_part = False
        self._finished_step = -1
        self._same_nodes = False
        self._learnt = Learnt(record)
        self._failures: list[report.Failure] = []
        self._index, self._number_lock = self._own_number()
        several = launch.config.max_nodes > 1
        self._keeper = NodeKeeper(
            settings, self._index, self._hear, listening=several,
            waiting=lambda: self._tending.feel(time.monotonic()),
        )  # fmt: skip
        self._tending = Tending(self._keeper, record)
        self._owner = Owner(settings, record)
        self._meeting = Meeting(launch.config)

    def run(self) -> int:
        """Run the job to its end; the exit code. Raises :class:`EverstepError` where it cannot
        be run at all."""
        try:
            while True:
                decision = self._attempt()
                if decision.action == "stop":
                    return self._stop(decision)
                self._history = decision.history
        finally:
            self._close()

    # -- one attempt

    def _attempt(self) -> Decision:
        self._failures = []
        try:
            with self._signals.interruptible():
                round_, plan = self._prepare()
        except Interrupted:
            return self._interrupted()
        if plan.exit_code is not None:
            return Decision("stop", plan.exit_code, plan.reason, self._history)
        with agree.sign_of_life(round_):
            end = self._run_workers(round_, plan)
            if self._owner.lost:
                return Decision("stop", exits.OWNED, self._owner.lost, self._history)
            decision = self._agree(round_, end)
        self._say_ended(plan, decision)
        return decision

    def _run_workers(self, round_: Round, plan: Plan) -> NodeEnd:
        place, config = self._place(round_, plan), self._launch.config
        group = self._start(round_, plan, place)
        torch_events.workers_started(config.event_log_handler, place, config.role, group.pids)
        try:
            end = self._supervise(round_, group)
        finally:
            # Nothing but an error of the agent itself leaves workers here: they go before it.
            group.kill(signal.SIGKILL)
        torch_events.workers_ended(
            config.event_log_handler, place, config.role, group.pids, group.ended
        )
        group.close()
        self._failures = group.failures
        self._finished_step = self._keeper.finished_step(plan.attempt, len(place.ranks))
        self._keeper.workers_ended(plan.attempt)
        return end

    def _prepare(self) -> tuple[Round, Plan]:
        """Everything up to the start of the workers: meet, claim (S6), begin at the keeper."""
        alone = self._meeting.alone
        attempt = self._claim_alone() if alone else 0  # before a keeper is started for nothing
        self._record.attempt = attempt or self._record.attempt
        if not self._keeper.attached:
            self._keeper.launch()
        round_ = self._meet()
        if round_.leads:
            return round_, self._lead(round_, attempt)
        return round_, self._follow(round_)

    def _claim_alone(self) -> int:
        """S6: the owner may go on from memory while the store is away. Several nodes wait for it:
        whether each still holds its part only their keepers know."""
        return self._owner.claim(promise=self._reached and self._keeper.holds_memory)

    def _meet(self) -> Round:
        if self._same_nodes:
            self._same_nodes = False
            round_ = self._meeting.again()
            try:
                self._enter(round_, AGAIN_SECONDS)
            except StoreSilent:
                raise
            except AgentError:
                # An agent has died since the verdict: torch's rendezvous waits for another.
                return self._meet()
            return round_
        round_ = self._meeting.next()
        self._enter(round_, GATHER_SECONDS)
        return round_

    def _enter(self, round_: Round, timeout: float) -> None:
        config = self._launch.config
        entry = NodeEntry(config.role, config.nproc_per_node, socket.gethostname(), self._index)
        round_.enter(entry, keep_ranks=self._meeting.static, timeout=timeout)

    def _lead(self, round_: Round, attempt: int) -> Plan:
        try:
            self._meeting.refresh_port(round_)
            plan, port = self._begin_at(round_, attempt)
        except EverstepError as error:
            round_.publish(Plan(exit_code=exit_code_of(error), reason=str(error)))
            raise
        plan = msgspec.structs.replace(plan, coordinator=(round_.master_addr, port))
        round_.publish(plan)
        return plan

    def _begin_at(self, round_: Round, attempt: int) -> tuple[Plan, int]:
        """The plan of ``attempt``, or of the next one that can be had, begun at this node's
        keeper; and the keeper's port."""
        while True:
            plan = Plan(
                nodes=round_.entries,
                attempt=attempt or self._owner.claim(patience=self._patience),
                claimant=self._owner.id,
                restarts=self._history.restarts,
                expected=self._expected,
                master_addr=round_.master_addr,
                master_port=round_.master_port,
                token=secrets.token_hex(16) if round_.nodes > 1 else "",
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
        return STALE_SECONDS + LEADER_SECONDS if self._took_part else 0.0

    def _follow(self, round_: Round) -> Plan:
        self._owner.release()  # where the node that leads has changed
        plan = round_.plan()
        if plan.exit_code is None:
            # Known to every node, should the lead move to it.
            self._history = replace(self._history, restarts=plan.restarts)
            self._begin(round_, plan)
        return plan

    def _begin(self, round_: Round, plan: Plan) -> int:
        """Begin the attempt at this node's keeper; the port on which it hears other keepers."""
        self._record.attempt = plan.attempt
        self._record.at_node(round_.node)
        self._learnt = Learnt(self._record)
        self._took_part = True
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
        self._record.say(
            "keeper.started", f"keeper {what} (pid {self._keeper.pid}), log {self._keeper.log}",
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
            agent=plan.claimant,
            claimed=self._owner.claimed,
            environment=_environment(),
        )

    def _start(self, round_: Round, plan: Plan, place: Place) -> Workers:
        points.reach("agent.workers.before_start")
        group = workers.start(
            self._launch.config, self._launch.entrypoint, self._launch.arguments,
            place, self._worker_settings(round_, plan),
        )  # fmt: skip
        self._keeper.workers_started(group.pids)
        points.reach("agent.workers.after_start")
        self._record.say(
            "workers.started", f"workers started: {group.pids}", level="debug",
            pids={str(rank): pid for rank, pid in group.pids.items()},
        )  # fmt: skip
        return group

    def _supervise(self, round_: Round, group: Workers) -> NodeEnd:
        return Supervision(
            round_=round_, meeting=self._meeting, workers=group, keeper=self._keeper,
            tending=self._tending, learnt=self._learnt, signals=self._signals, record=self._record,
            grace=self._launch.settings.grace,
            shutdown=float(self._launch.config.shutdown_timeout or 0), owner=self._owner,
            listen_every=self._launch.config.monitor_interval,
        ).run()  # fmt: skip

    # -- after it

    def _agree(self, round_: Round, end: NodeEnd) -> Decision:
        """What all nodes do next: the leader decides, from what all nodes say."""
        if round_.nodes == 1:
            return self._decide({0: end}, 1)
        try:
            with self._signals.interruptible():
                round_.say_ended(end)
                if round_.leads:
                    decision = self._decide(agree.gather_ends(round_), round_.nodes)
                    agree.announce(round_, decision, same_nodes=self._same_nodes)
                else:
                    decision, self._same_nodes = agree.hear_verdict(round_, self._history)
                if decision.action == "stop":
                    agree.part(round_)
                return decision
        except Interrupted:
            return self._interrupted()
        except RuntimeError as gone:  # torch's store: its host, the leader's agent, is dead
            raise AgentError(
                f"the leader of the job (node 0) cannot be reached: {gone}.",
                hint="Start the job again on all nodes; it goes on from the newest state.",
            ) from gone

    def _decide(self, ends: dict[int, NodeEnd], nodes: int) -> Decision:
        end = replace(agree.combine(ends, nodes), finished_step=self._finished_step)
        self._same_nodes = not end.lost_nodes and not end.members_changed
        self._reached = self._reached or end.reached >= 0  # a complete snapshot stays in memory
        self._expected = self._expected or self._reached or end.restored >= 0
        return decide(end, self._history, self._launch.max_restarts)

    def _interrupted(self) -> Decision:
        number = next(iter(self._signals.take()), signal.SIGTERM)
        return decide(AttemptEnd(stopped_by=int(number)), self._history, None)

    def _say_ended(self, plan: Plan, decision: Decision) -> None:
        going_on = decision.action == "restart"
        self._record.say(
            "attempt.ended",
            f"attempt {plan.attempt} ended: {decision.reason}"
            + ("; restarting" if going_on else ""),
            level="info" if going_on else "debug",  # what follows says it again
            action=decision.action, exit_code=decision.exit_code, reason=decision.reason,
            stuck=decision.history.stuck,
        )  # fmt: skip

    def _stop(self, decision: Decision) -> int:
        if decision.warning:
            self._record.say("job.warning", decision.warning, level="warning")
        wanted = decision.exit_code in (exits.FINISHED, exits.PREEMPTED)
        quiet = wanted or decision.exit_code > exits.SIGNALLED
        told = decision.reason
        if decision.exit_code in exits.FINAL and report.tell_refusals(self._failures):
            told = "the job cannot go on: see the error above; a restart would not help"
        elif not quiet and any(not failure.ours for failure in self._failures):
            report.tell(self._launch.name, self._failures)
        self._record.say(
            "job.stopped", f"exit code {decision.exit_code}: {told}",
            level="info" if quiet else "error", exit_code=decision.exit_code,
            reason=decision.reason, errors=report.messages(self._failures),
        )  # fmt: skip
        if self._launch.temporary_logs and not self._failures:
            shutil.rmtree(self._launch.temporary_logs, ignore_errors=True)
        self._keeper.leave()
        self._owner.release()
        self._meeting.leave(for_good=decision.exit_code != exits.PREEMPTED)
        return decision.exit_code

    def _close(self) -> None:
        self._keeper.close()
        self._owner.close()
        self._meeting.close()
        self._number_lock.close()

    # -- what is handed on

    def _hear(self, message: Report | Fatal) -> None:
        self._learnt.hear(message)

    def _own_number(self) -> tuple[int, socket.socket]:
        settings = self._launch.settings
        config = self._launch.config
        if config.max_nodes == 1:
            only = 0
        elif config.rdzv_backend == "static":
            only = int(config.rdzv_configs["rank"])
        else:
            return claim_index(settings)
        lock = hold_index(settings, only)
        if lock is None:
            raise JobOwned(
                f"another agent on this host ({holder_of(settings, only)}) runs node {only} of "
                f"job {settings.job} in {settings.store}.",
                hint="Stop it first, or give this run another --job.",
            )
        return only, lock

    def _place(self, round_: Round, plan: Plan) -> Place:
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
            run_id=self._meeting.run_id,
            use_agent_store=self._meeting.use_agent_store,
        )

    def _worker_settings(self, round_: Round, plan: Plan) -> dict[str, str]:
        own: dict[str, Any] = {
            "keeper": self._keeper.name,
            "attempt": plan.attempt,
            "node": round_.node,
            "nodes": round_.nodes,
            "ranks": ",".join(f"{ranks[0]}-{ranks[-1]}" for ranks in plan.ranks_of_node()),
            "agent_pid": os.getpid(),
            "assumed": ",".join(sorted({"store", "job"} - self._launch.given)),
        }
        # Said even where they are the defaults: the agent's own environment may hold others.
        always = {*own, *self._launch.given}
        return to_environment(replace(self._launch.settings, **own), always)


def exit_code_of(error: EverstepError) -> int:
    """The exit code of a run that ``error`` prevents."""
    if isinstance(error, JobOwned):
        return exits.OWNED
    if isinstance(error, NoRecoveryPoint):
        return exits.NO_RECOVERY_POINT
    if isinstance(error, RestoreError):
        return exits.REFUSED
    if error.blame == "user":
        return exits.USAGE
    return exits.NO_STORE if isinstance(error, StoreError) else exits.FAILED


def _environment() -> dict[str, str]:
    """What R4 warns about where it changed: recorded with the attempt's branch."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
