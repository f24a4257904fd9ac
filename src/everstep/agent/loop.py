"""The agent: attempt after attempt until one of them is the last.

Owns: the order of things. Never does: decide (:mod:`everstep.agent.decide`). Called by: main.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import time
from collections.abc import Sequence

import msgspec

from everstep.agent import agree, report, torch_events, workers
from everstep.agent.begin import Beginning
from everstep.agent.decide import AttemptEnd, Decision, last_word
from everstep.agent.ending import show_output, tell_end
from everstep.agent.evidence import Evidence
from everstep.agent.flags import Launch
from everstep.agent.hang import HangWatch, Patience, emptied, stacks_folder
from everstep.agent.incident import Case
from everstep.agent.keeper import NodeKeeper
from everstep.agent.lead import OTHERS_SECONDS, Follower, Late, Lead
from everstep.agent.number import own_index
from everstep.agent.output import Output
from everstep.agent.owner import Owner
from everstep.agent.policy import catalog_of
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import (
    NodeEnd,
    NotNeeded,
    Plan,
    Round,
    found_again,
)
from everstep.agent.signals import Interrupted, Signals
from everstep.agent.supervise import Provisional, Supervision
from everstep.agent.tend import Tending
from everstep.agent.watch.flight import Flight, variables
from everstep.agent.watch.stacks import Stacks
from everstep.agent.watch.steps import Steps, heartbeats
from everstep.agent.workers import Place, Workers
from everstep.core import exits, points
from everstep.core.settings import variable
from everstep.errors import (
    RendezvousLost,
)
from everstep.faults.hang import RankBeat
from everstep.faults.records import Signal
from everstep.keeper.wire import Fatal, Report

MEET_SECONDS = 0.2
"""Between two tries to find the rendezvous again."""


class Agent:
    """One call of ``everstep run`` on one node."""

    def __init__(self, launch: Launch, signals: Signals, record: Recorder) -> None:
        settings = launch.settings
        self._launch = launch
        self._signals = signals
        self._record = record
        self._began, self._failed = 0.0, math.inf
        self._follower: Follower | None = None
        self._silence: agree.Silence | None = None
        self._hangs = Patience()
        self._workers_ended_at = math.inf
        self._failures: list[report.Failure] = []
        catalog = catalog_of(settings)
        self._output = Output(catalog, lambda text: record.lost("output.unread", text))
        self._index, self._number_lock = own_index(launch)
        several = launch.config.max_nodes > 1
        self._keeper = NodeKeeper(
            settings, self._index, self._hear, listening=several,
            waiting=lambda: self._tending.feel(time.monotonic()),
            unlogged=lambda text: record.lost("keeper.log_lost", text),
        )  # fmt: skip
        self._tending = Tending(self._keeper, record)
        self._owner = Owner(settings, record)
        self._evidence = Evidence(settings, catalog.result)
        self._stacks = stacks_folder(settings, self._index)
        self._lead = Lead(launch, self._owner, self._evidence, catalog.result, record, self._wait)
        self._beginning = Beginning(
            launch, self._index, self._keeper, self._tending, self._owner, self._lead, record
        )

    def run(self) -> int:
        """Run the job to its end; the exit code. Raises :class:`EverstepError` where it cannot
        be run at all."""
        try:
            while True:
                try:
                    decision = self._attempt()
                except RendezvousLost as lost:
                    decision = self._meet_anew(lost)
                if decision.action == "restart":
                    decision = self._rest(decision)
                if decision.action == "stop":
                    return self._stop(decision)
        finally:
            self._close()

    def _meet_anew(self, lost: RendezvousLost) -> Decision:
        """The agent that held the rendezvous is gone: wait for one in its place, with what the
        keeper holds. Raises ``lost`` where this agent has no part in the job yet, or none comes."""
        if self._beginning.meeting.alone or not self._beginning.took_part:
            raise lost
        self._record.say(
            "rendezvous.lost", f"{lost.what} Waiting for it to come back.", level="warning"
        )
        self._owner.release()
        self._lead.forget()
        self._beginning.meeting.close()
        self._beginning.same_nodes, deadline = (
            False,
            time.monotonic() + self._beginning.meeting.patience,
        )
        looking = found_again(self._launch.config)
        while True:
            if select.select([self._signals], [], [], MEET_SECONDS)[0]:
                return self._interrupted()
            if looking.done() and looking.exception() is None:
                self._beginning.meeting = looking.result()
                return Decision("restart", 0, "the rendezvous is back")
            if time.monotonic() >= deadline:
                raise lost
            if looking.done():
                looking = found_again(self._launch.config)

    def _rest(self, decision: Decision) -> Decision:
        """Wait before the next attempt, where that was decided; a signal ends it."""
        if decision.delay <= 0:
            return decision
        self._record.say(
            "attempt.waits", f"the next attempt begins in {decision.delay:.0f} s",
            seconds=decision.delay, reason=decision.reason,
        )  # fmt: skip
        ready = select.select([self._signals], [], [], decision.delay)[0]
        return self._interrupted() if ready else decision

    def _wait(self, seconds: float) -> None:
        select.select([self._signals], [], [], seconds)

    # -- one attempt

    def _attempt(self) -> Decision:
        self._failures = []
        try:
            with self._signals.interruptible():
                prepared = self._beginning.prepare()
        except Interrupted:
            return self._interrupted()
        except NotNeeded:
            return Decision("stop", exits.FINISHED, "the job ended before it needed this node")
        if isinstance(prepared, Decision):
            return prepared
        round_, plan = prepared
        with agree.sign_of_life(round_):
            end = self._run_workers(round_, plan)
            if self._owner.lost:
                return Decision("stop", exits.OWNED, self._owner.lost)
            decision = self._agree(round_, plan, end)
        self._say_ended(plan, decision)
        return decision

    def _run_workers(self, round_: Round, plan: Plan) -> NodeEnd:
        place, config = self._beginning.place(round_, plan), self._launch.config
        self._began, self._failed = time.monotonic(), math.inf
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
        beats = Steps(self._keeper, plan.attempt, tuple(group.pids)).read()
        self._keeper.workers_ended(plan.attempt)
        self._learn_patience(end)
        return self._with_evidence(end, beats, group, round_.nodes)

    def _with_evidence(
        self, end: NodeEnd, beats: Sequence[RankBeat], group: Workers, nodes: int
    ) -> NodeEnd:
        if not self._failures:
            return end
        self._evidence.look()
        now = time.monotonic()
        told = [beat for beat in beats if beat.boundary_at > 0.0]
        last = heartbeats(told, now, now - self._began)
        said = (*end.signals, *last, *group.evidence(0.0))
        try:
            seen = self._evidence.of(said, self._began, self._failed, nodes=nodes)
        except Exception as error:  # noqa: BLE001 - a bug of everstep's own costs evidence, no job
            self._record.say(
                "evidence.lost", "what was seen could not be gathered, which is a bug of "
                f"everstep: {type(error).__name__}: {error}", level="error",
            )  # fmt: skip
            seen = ()
        return msgspec.structs.replace(end, signals=seen)

    def _learn_patience(self, end: NodeEnd) -> None:
        """How long a restart takes is known once it has led to a step."""
        resume = self._beginning.learnt.resumed_at - self._workers_ended_at
        self._lead.ended(took=self._beginning.learnt.resumed_at - self._began)
        self._hangs = self._hangs.after(
            hung=bool(end.hang), step=end.finished, resume=resume if math.isfinite(resume) else 0.0
        )
        self._workers_ended_at = time.monotonic()

    def _start(self, round_: Round, plan: Plan, place: Place) -> Workers:
        points.reach("agent.workers.before_start")
        told = self._beginning.worker_settings(round_, plan, self._stacks)
        group = workers.start(
            self._launch.config, self._launch.entrypoint, self._launch.arguments,
            place, told | self._answering(), self._output, plan.names()[round_.node],
        )  # fmt: skip
        if group.unwritten:
            self._record.lost(
                "logs.lost", f"workers get no files for logs and errors: {group.unwritten}. Their "
                "output is shown here. TMPDIR or --log-dir names another folder.",
            )  # fmt: skip
        nodes = dict(zip(plan.names(), plan.ranks_of_node(), strict=True))
        self._lead.began(time.monotonic(), nodes, plan.names()[round_.node])
        self._keeper.workers_started(group.pids)
        points.reach("agent.workers.after_start")
        self._record.say(
            "workers.started", f"workers started: {group.pids}", level="debug",
            pids={str(rank): pid for rank, pid in group.pids.items()},
        )  # fmt: skip
        return group

    def _answering(self) -> dict[str, str]:
        """Variables by which workers can be looked at while they are stuck."""
        if why := emptied(self._stacks):
            self._record.lost(
                "hang.blind", f"workers cannot be asked where they stand: {why}. Evidence of a "
                "hang will be poorer; --state-dir names another folder.",
            )  # fmt: skip
            return {variable("stacks"): ""}
        return variables(self._stacks, os.environ)

    def _supervise(self, round_: Round, group: Workers) -> NodeEnd:
        supervision = Supervision(
            round_=round_, meeting=self._beginning.meeting, workers=group, keeper=self._keeper,
            tending=self._tending, learnt=self._beginning.learnt, signals=self._signals,
            record=self._record,
            grace=self._launch.settings.grace,
            shutdown=float(self._launch.config.shutdown_timeout or 0), owner=self._owner,
            listen_every=self._launch.config.monitor_interval,
            provisional=self._provisional(round_), hang=self._hang_watch(group),
        )  # fmt: skip
        end = supervision.run()
        self._silence = supervision.silence
        self._failed = min(supervision.failed_at, time.monotonic())
        return end

    def _provisional(self, round_: Round) -> Provisional:
        if round_.leads or self._follower is None:
            return Late(self._lead, self._keeper.release)
        return self._follower

    def _hang_watch(self, group: Workers) -> HangWatch:
        began, ranks = self._began, tuple(group.pids)
        return HangWatch(
            steps=Steps(self._keeper, self._record.attempt, ranks),
            stacks=Stacks(self._stacks, group.pids, began),
            flight=Flight(self._stacks, ranks, began, os.environ),
            record=self._record, patience=self._hangs, began=began,
            policy=self._hangs.policy(self._launch.settings.hang_floor),
        )  # fmt: skip

    # -- after it

    def _agree(self, round_: Round, plan: Plan, end: NodeEnd) -> Decision:
        """What all nodes do next: the leader decides, from what all nodes say."""
        if round_.nodes == 1:
            return self._decide(round_, plan, {0: end})
        try:
            with self._signals.interruptible():
                round_.say_ended(end)
                if round_.leads:
                    decision = self._decide(round_, plan, agree.gather_ends(round_, self._silence))
                    leave = self._parting(plan, decision)
                    self._beginning.same_nodes = self._beginning.same_nodes and not leave
                    agree.announce(
                        round_, decision, same_nodes=self._beginning.same_nodes, leave=leave
                    )
                    if round_.node in leave:
                        decision = Decision("stop", exits.LEFT_OUT, decision.reason)
                else:
                    self._follower = self._owing(round_, plan)
                    heard = agree.hear_decision(round_, meanwhile=self._follower.look)
                    decision, self._beginning.same_nodes = heard
                if decision.action == "stop" and decision.exit_code != exits.LEFT_OUT:
                    agree.part(round_)
                return decision
        except Interrupted:
            return self._interrupted()
        except RuntimeError as gone:  # torch's store: its host, the leader's agent, is dead
            raise RendezvousLost(
                f"the leader of the job (node 0) cannot be reached: {gone}.",
                hint="Start its agent again, or another one in its place.",
            ) from gone

    def _decide(self, round_: Round, plan: Plan, ends: dict[int, NodeEnd]) -> Decision:
        end = agree.combine(ends, len(plan.nodes))
        self._beginning.learn(end)
        spares = self._beginning.meeting.spares()
        case = Case(
            plan, ends, end, self._began, self._failed, spares,
            others=lambda: self._others(round_),
        )  # fmt: skip
        decision = self._lead.decide(case)
        if decision.action == "restart" and not end.members_changed:
            self._beginning.restarts += 1
        return decision

    def _owing(self, round_: Round, plan: Plan) -> Follower:
        line = self._beginning.meeting.line
        assert line is not None, "several nodes always have a line"

        def say(seen: tuple[Signal, ...]) -> None:
            line.submit(lambda: round_.say_late(seen))

        return Follower(
            self._evidence, say,
            began=self._began, failed=self._failed, name=plan.names()[round_.node],
            patience=self._launch.settings.verdict_deadline,
        )  # fmt: skip

    def _others(self, round_: Round) -> tuple[Signal, ...]:
        """What the other nodes have seen since they ended, as far as the store gives it."""
        line = self._beginning.meeting.line
        if line is None or round_.nodes == 1:
            return ()
        try:
            return line.submit(round_.late).result(OTHERS_SECONDS)
        except (TimeoutError, RuntimeError, RendezvousLost):
            return ()

    def _parting(self, plan: Plan, decision: Decision) -> tuple[int, ...]:
        if decision.record is None or decision.action == "stop":
            return ()
        return self._lead.left_out(plan.names(), decision.record, self._beginning.meeting.spares())

    def _interrupted(self) -> Decision:
        number = next(iter(self._signals.take()), signal.SIGTERM)
        word = last_word(AttemptEnd(stopped_by=int(number)))
        assert word is not None, "a signal is always the last word"
        self._lead.interrupted(word)
        return Decision("stop", word.exit_code, word.reason, word.warning)

    def _say_ended(self, plan: Plan, decision: Decision) -> None:
        going_on = decision.action == "restart"
        self._record.say(
            "attempt.ended",
            f"attempt {plan.attempt} ended: {_why(decision)}" + ("; restarting" * going_on),
            # Where this agent decided, it has said so; a stop is said again by what follows.
            level="info" if going_on and decision.record is None else "debug",
            action=decision.action, exit_code=decision.exit_code, reason=decision.reason,
        )  # fmt: skip

    def _stop(self, decision: Decision) -> int:
        show_output(self._output, self._signals, self._record, decision)
        tell_end(self._launch, self._record, decision, self._failures)
        if self._launch.temporary_logs and not self._failures:
            shutil.rmtree(self._launch.temporary_logs, ignore_errors=True)
        if decision.exit_code not in (exits.FINISHED, exits.PREEMPTED):
            self._lead.give_up()
        self._keeper.leave()
        self._owner.release()
        self._beginning.meeting.leave(
            for_good=decision.exit_code not in (exits.PREEMPTED, exits.LEFT_OUT)
            and self._beginning.took_part
        )
        return decision.exit_code

    def _close(self) -> None:
        self._evidence.close()
        shutil.rmtree(self._stacks, ignore_errors=True)
        self._output.close()
        self._lead.close()
        self._keeper.close()
        self._owner.close()
        self._beginning.meeting.close()
        self._number_lock.close()

    # -- what is handed on

    def _hear(self, message: Report | Fatal) -> None:
        self._beginning.learnt.hear(message)


def _why(decision: Decision) -> str:
    """The reason without the failure, which was told before."""
    return decision.record.rung.why if decision.record is not None else decision.reason
