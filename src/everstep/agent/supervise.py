"""One attempt while it runs on this node: from started workers to the last one's end.

Owns: waiting for whatever comes first, and when the survivors are killed. Never does: decide
what follows. Called by: the loop.
"""

from __future__ import annotations

import math
import select
import signal
import time
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from torch.distributed.elastic.rendezvous.api import RendezvousError

from everstep.agent.agree import BEAT_SECONDS, Silence
from everstep.agent.decide import WorkerEnd, describe, peaceful
from everstep.agent.hang import Hang, HangWatch
from everstep.agent.keeper import NodeKeeper
from everstep.agent.lead import Lead
from everstep.agent.line import SILENT_SECONDS
from everstep.agent.owner import Owner
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import Meeting, NodeEnd, Round
from everstep.agent.signals import Signals
from everstep.agent.standings import Standings
from everstep.agent.tend import Tending
from everstep.agent.workers import Workers
from everstep.core import exits
from everstep.core.events import Event, counted
from everstep.errors import RendezvousLost
from everstep.faults.redact import redact
from everstep.keeper.wire import Fatal, Report

EVIDENCE_SECONDS = 0.3
"""After a worker failed by itself: what the others say of it in this time is kept."""
STEP_SECONDS = 0.05
"""Between two looks for the first new step after a restart."""
TOLD_SECONDS = 1.0
"""After a hang was found, for the other nodes to hear of it and to look at their own workers."""
STILL_SECONDS = 1.0
"""Between two looks whether a step was finished, while an answer of other nodes is waited for."""
PARTING_SECONDS = 10.0
"""After the job finished or a worker was told to end it: for the others to end by themselves."""


class Seen(NamedTuple):
    """How the other nodes are: whether a worker there has ``failed``, and because it ``hangs``;
    whether a node waits to join; whose agents were ``silent`` for long."""

    failed: bool
    hangs: bool
    wait: bool
    silent: set[int]


class Provisional(Protocol):
    """What an attempt waits for that goes on from an incident which is still open."""

    @property
    def due(self) -> float:
        """When it is closed (CLOCK_MONOTONIC); infinite where there is none."""

    def settle(self) -> str:
        """Close it: why the attempt may not go on, an empty text where it may."""


class Learnt:
    """What the keeper's messages tell of one attempt, and so of incidents before it (``lead``)."""

    def __init__(self, record: Recorder, lead: Lead) -> None:
        self._record = record
        self._lead = lead
        self.proofs = lead.proofs
        self.restored = -1
        self.reached = -1
        self.committed = -1
        self.useful = 0.0
        self._began = 0.0
        self._passed = lead.committed
        self.attached = False
        self.finished = False
        self.fatal: tuple[int, str] | None = None
        self.resumed_at = math.inf

    def hear(self, message: Report | Fatal) -> None:
        if isinstance(message, Fatal):
            self.attached = True
            what = redact(message.what)  # it becomes the reason of records, and of all that is told
            self.fatal = self.fatal or (message.exit_code, f"rank {message.rank}: {what}")
        elif message.event.attempt in (0, self._record.attempt):
            self._learn(message.event)
            self._record.relay(message.event)

    def _learn(self, event: Event) -> None:
        self.attached = self.attached or event.source == "worker"
        step = -1 if event.step is None else event.step
        if event.kind == "restore.elected":
            self.attached = True
            if event.facts.get("source") != "fresh":
                self.restored = max(self.restored, step)
            self._began = event.mono
            self.proofs.restored(self.restored, str(event.facts.get("source")), event.mono)
        elif event.kind == "snapshot.complete":
            self.attached = True
            self.reached = max(self.reached, step)
        elif event.kind == "checkpoint.committed":
            self._commit(step, event.mono)
        elif event.kind == "replay.differed":
            self._lead.differed()
        elif event.kind == "job.finished":
            self.finished = True
        elif event.kind == "train.resumed":
            self.resumed_at = min(self.resumed_at, event.mono)

    def _commit(self, step: int, mono: float) -> None:
        """Count the part of the time since the restore that led to new committed steps."""
        self.committed = max(self.committed, step)
        self._lead.proved(step)
        new = step - max(self._passed, self.restored, 0)
        done = step - max(self.restored, 0)
        if self._began and new > 0 and done > 0:
            self.useful = max(self.useful, (mono - self._began) * new / done)


class Supervision:
    """Runs one attempt to its end on this node. The owner's loss ends it at once."""

    def __init__(
        self,
        *,
        round_: Round,
        meeting: Meeting,
        workers: Workers,
        keeper: NodeKeeper,
        tending: Tending,
        learnt: Learnt,
        signals: Signals,
        record: Recorder,
        grace: float,
        shutdown: float,
        owner: Owner,
        listen_every: float,
        provisional: Provisional,
        hang: HangWatch,
    ) -> None:
        self._round = round_
        self._meeting = meeting
        self._workers = workers
        self._keeper = keeper
        self._tending = tending
        self._learnt = learnt
        self._signals = signals
        self._record = record
        self._grace = grace
        self._shutdown = shutdown
        self._owner = owner
        self._listen_every = listen_every
        self._provisional = provisional
        self._hang = hang
        self._hung: Hang | None = None
        self._standings = Standings(round_)
        self._kill_at = math.inf
        self._why = ""
        self._told = False
        self._unreachable = ""
        self._next_look = 0.0
        self._looking: Future[Seen] | None = None
        self._silence = Silence(round_, time.monotonic) if round_.leads else None
        self._next_silence = self._moved_at = self._asked_at = time.monotonic()
        self._step = -1
        self._stopped_by: int | None = None
        self._members_changed = False
        self.failed_at = math.inf

    def run(self) -> NodeEnd:
        """Until every worker of this node has ended and the other nodes' fate is known."""
        while self._workers.running:
            self._wait()
            self._look()
        self._record.say(
            "workers.ended", "all workers of this node have ended", level="debug",
            detail=self._why,
        )  # fmt: skip
        if self._unreachable:
            raise RendezvousLost(
                f"the rendezvous of the job cannot be reached any more: {self._unreachable}.",
                hint="The agent that holds it died: start it again on that node, or another one "
                "in its place.",
            )
        return self.end()

    @property
    def silence(self) -> Silence | None:
        """The leader: how long the other agents have shown no life."""
        return self._silence

    def end(self) -> NodeEnd:
        """What this node has to say of the attempt."""
        learnt = self._learnt
        steps = self._steps()
        return NodeEnd(
            workers=tuple((w.rank, w.code, w.by_everstep) for w in self._workers.ended),
            restored=learnt.restored, reached=learnt.reached, attached=learnt.attached,
            job_finished=learnt.finished, fatal=learnt.fatal, stopped_by=self._stopped_by,
            members_changed=self._members_changed, committed=learnt.committed,
            useful=learnt.useful, steps=steps, finished=min(steps.values(), default=-1),
            hang="" if self._hung is None else self._hung.reason,
            hung=() if self._hung is None else self._hung.culprits,
            age=0.0 if self._hung is None else self._hung.age,
            signals=tuple(self._hang.evidence),
        )  # fmt: skip

    def _steps(self) -> dict[int, int]:
        """The newest step that each rank of this node has finished."""
        return self._keeper.finished_steps(self._record.attempt, list(self._workers.pids))

    # -- waiting

    def _wait(self) -> None:
        waiting = select.poll()
        for fd in (*self._workers.descriptors, *self._keeper.descriptors, self._owner.fileno()):
            waiting.register(fd, select.POLLIN)
        waiting.register(self._signals.fileno(), select.POLLIN)
        if self._meeting.line is not None:
            waiting.register(self._meeting.line.fileno(), select.POLLIN)
        now = time.monotonic()
        next_look = self._next_look
        if self._looking is not None:
            next_look = now + max(STILL_SECONDS, self._listen_every)
        due = min(self._kill_at, next_look, self._tending.due, self._provisional.due)
        due = min(due, self._hang.due)
        if self._workers.must_be_polled:
            due = min(due, now + self._listen_every)
        if self._learnt.proofs.waits_for_step:
            due = min(due, now + STEP_SECONDS)
        waiting.poll(max(0.0, due - now) * 1000 if due < math.inf else None)

    def _look(self) -> None:
        now = time.monotonic()
        self._tending.look(now)
        if self._learnt.proofs.waits_for_step:
            self._learnt.proofs.stepped(min(self._steps().values(), default=-1), now)
        for ended in self._workers.collect():
            self._on_end(ended, now)
        for number in self._signals.take():
            self._on_signal(number, now)
        if self._owner.lost:
            self._kill(now, "another agent runs the job now")
        if now >= self._provisional.due and (why := self._provisional.settle()):
            self._tell_nodes()
            self._kill(now, why)
        self._look_at_nodes(now)
        self._look_for_hang(now)
        if now >= self._kill_at and self._workers.running:
            self._kill(now, self._why)

    # -- what happens

    def _on_end(self, ended: WorkerEnd, now: float) -> None:
        ours = " (sent by everstep)" if ended.by_everstep else ""
        pid = self._workers.pids[ended.rank]
        # A final code is its worker's own word, and what ends the job is told at the end.
        quiet = ended.code == 0 or ended.by_everstep or ended.code in exits.FINAL
        self._record.say(
            "worker.exited", f"rank {ended.rank} (pid {pid}): {describe(ended.code)}{ours}",
            level="debug" if quiet else "warning", rank=ended.rank, pid=pid, code=ended.code,
            signal=describe(ended.code) if ended.code < 0 else "", by_everstep=ended.by_everstep,
        )  # fmt: skip
        if ended.by_everstep or ended.code == 0:
            return
        if peaceful(ended.code):
            self._kill_by(now + self._grace, f"rank {ended.rank} ended the job")
        elif self._learnt.finished:
            self._kill_by(now + PARTING_SECONDS, "the job finished")
        elif ended.code in exits.FINAL or self._learnt.fatal:
            self._kill_by(now + EVIDENCE_SECONDS, f"rank {ended.rank} ended the job")
        elif self._stopped_by is None:
            # A signal from outside is its own evidence; an error may have a cause elsewhere,
            # which the other ranks are about to tell.
            self.failed_at = min(self.failed_at, now)
            wait = 0.0 if ended.code < 0 else EVIDENCE_SECONDS
            self._kill_by(now + wait, f"rank {ended.rank} failed")
            self._tell_nodes()

    def _on_signal(self, number: signal.Signals, now: float) -> None:
        if self._stopped_by is not None:
            self._kill(now, f"a second signal, {number.name}")
            return
        self._stopped_by = int(number)
        preempted = number == signal.SIGTERM and self._learnt.attached and self._keeper.attached
        self._record.say(
            "signal.received", f"{number.name}: stopping", signal=number.name, preempted=preempted
        )
        if preempted:
            self._tending.hurry()
            self._keeper.preempt(self._grace)
            self._kill_by(now + self._grace, f"{number.name}, and the grace period is over")
        else:
            self._tell_nodes()
            self._workers.kill(number)
            self._kill_by(now + self._shutdown, f"{number.name}, and the shutdown time is over")

    def _look_for_hang(self, now: float) -> None:
        """Unless the attempt is ending anyway."""
        if self._stopped_by is not None or self._kill_at < math.inf or not self._workers.running:
            self._hang.stop()
            return
        if now < self._hang.due:
            return
        found = self._hang.look(now, self._standings.others())
        self._standings.tell(self._hang.standing)
        if found is not None:
            self._on_hang(found, now)

    def _on_hang(self, hang: Hang, now: float) -> None:
        self._hung = hang
        self.failed_at = min(self.failed_at, now)
        self._hang.stop()
        self._tell_nodes(hangs=True)
        self._hang.gather(now)
        self._record.say(
            "hang.found", hang.reason, level="warning", step=hang.step, ranks=list(hang.ranks),
            culprits=list(hang.culprits), age=round(hang.age, 1),
        )  # fmt: skip
        # Where these end, the other nodes' fail by it: those are looked at first.
        self._kill_by(now + (TOLD_SECONDS if self._round.nodes > 1 else 0.0), "the job hangs")

    def _look_at_nodes(self, now: float) -> None:
        """Ask how the other nodes are, or take the answer: their store is never waited for here."""
        line = self._meeting.line
        if line is None:
            self._next_look = math.inf
            return
        line.heard()
        self._observe_steps(now)
        if self._looking is not None and self._looking.done():
            looking, self._looking = self._looking, None
            try:
                self._hear_nodes(looking.result(), now)
            except (RendezvousError, RuntimeError) as gone:
                # torch's store is in the process of one of the agents, and that is dead.
                self._unreachable = str(gone)
                self._next_look = math.inf
                self._kill_by(now, "the other nodes cannot be reached any more")
        elif self._looking is not None:
            if now - self._asked_at >= SILENT_SECONDS and self._stands_still(now):
                # Cut off from it, these workers may wait for those of the other side for long.
                self._unreachable = f"no answer for {SILENT_SECONDS:g} s, and no step was finished"
                self._looking, self._next_look = None, math.inf
                self._kill_by(now, "the other nodes cannot be reached any more")
        elif now >= self._next_look:
            self._next_look = math.inf if self._told else now + self._listen_every
            if not self._told:
                self._looking, self._asked_at = line.submit(self._read_nodes), now

    def _read_nodes(self) -> Seen:
        """How the other nodes are; for the leader also whose agents have shown no life for long."""
        failed, silent = self._round.failed(), set[int]()
        if self._silence is not None and time.monotonic() >= self._next_silence:
            self._next_silence = time.monotonic() + BEAT_SECONDS
            silent = self._silence.nodes()
        hangs = failed and self._round.hangs()
        self._standings.exchange(time.monotonic(), suspects=self._hang.suspects)
        return Seen(failed, hangs, not failed and self._meeting.members_wait(), silent)

    def _hear_nodes(self, seen: Seen, now: float) -> None:
        if self._told:
            return
        if seen.silent and self._stands_still(now):
            # Where it died before its workers met the others nothing breaks: they would wait.
            self._tell_nodes()
            lost = min(seen.silent)
            self._kill_by(now, f"node {lost} has shown no life for {SILENT_SECONDS:g} s")
        elif seen.failed:
            self._told = True
            if seen.hangs:
                self._hang.gather(now)
            self._kill_by(now, "a worker of another node failed")
        elif seen.wait:
            self._members_changed = True
            self._tell_nodes()
            self._kill_by(now, "a node waits to join")

    def _observe_steps(self, now: float) -> None:
        """When a step was finished last is known to a look, not to the moment that asks for it:
        then it would count from there."""
        step = min(self._steps().values(), default=-1)
        if step != self._step:
            self._step, self._moved_at = step, now

    def _stands_still(self, now: float) -> bool:
        """Whether no step was finished here for as long: an agent that hangs alone harms nobody."""
        return now - self._moved_at >= SILENT_SECONDS

    # -- what is done

    def _tell_nodes(self, *, hangs: bool = False) -> None:
        if not self._told and self._round.nodes > 1:
            self._told = True
            line = self._meeting.line
            assert line is not None, "several nodes always have a line"
            # Where it fails, saying how this node ended does.
            line.submit(partial(self._round.say_failed, hangs=hangs))

    def _kill_by(self, when: float, why: str) -> None:
        if when < self._kill_at:
            self._kill_at, self._why = when, why

    def _kill(self, now: float, why: str) -> None:
        del now
        self._kill_at = math.inf
        pids = self._workers.kill(signal.SIGKILL)
        if pids:
            self._record.say(
                "workers.killed",
                f"{why}: killed {counted(len(pids), 'other worker')} of this node",
                level="debug", pids=pids, signal="SIGKILL", reason=why,
            )  # fmt: skip
