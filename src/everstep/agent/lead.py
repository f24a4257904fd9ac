"""What the agent that leads does besides: decide before, between and during attempts.

Owns: the decision that the next attempt carries out, what may still change it while it runs (an
incident that is open, a rung of the ladder that leads nowhere), and what became of each incident.
Never does: touch a worker, a keeper or the rendezvous. Called by: the loop; supervise asks it while
workers run (:class:`~everstep.agent.supervise.Provisional`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping

import msgspec

from everstep.agent.chronicle import Chronicle
from everstep.agent.decide import Decision, LastWord, last_word
from everstep.agent.evidence import Evidence
from everstep.agent.flags import Launch
from everstep.agent.incident import Case
from everstep.agent.notify import Notifier
from everstep.agent.owner import Owner
from everstep.agent.policy import policy_of
from everstep.agent.proof import Proofs
from everstep.agent.record import Recorder
from everstep.agent.rendezvous import Asked
from everstep.agent.respond import Responder, newer
from everstep.core import points
from everstep.core.clock import SystemClock
from everstep.faults.catalog import Catalog
from everstep.faults.fold import fold
from everstep.faults.history import DecisionRecord, ResultRecord
from everstep.faults.outcomes import RESUME_WITHIN, outcome_of
from everstep.faults.records import Incident, Signal
from everstep.faults.tell import how_it_ended

RESUME_TIMES = 3.0
"""A restart may take so many times as long as the slowest that was seen."""
LATE_SHARE = 0.75
"""Of the time for which an incident is open: when nodes tell what they have seen since."""
OTHERS_SECONDS = 0.5
"""For the rendezvous' store to give what the others have told."""
HEALTH_SECONDS = 10.0
"""Between two looks at what the node's sources tell while workers run."""
OVERDUE_SECONDS = 60.0
"""Between two looks for incidents whose time to be proved is over."""


class Lead:
    """``wait`` waits so many seconds, or until a signal comes. It is the leader's only from
    :meth:`ready` on; an agent that follows has one that is never asked."""

    def __init__(
        self,
        launch: Launch,
        owner: Owner,
        evidence: Evidence,
        catalog: Callable[[], Catalog],
        record: Recorder,
        wait: Callable[[float], None],
    ) -> None:
        settings = launch.settings
        self._owner = owner
        self._evidence = evidence
        self._record = record
        self._wait = wait
        self._notifier = Notifier(settings.notify, settings.job, settings.store, record)
        self._chronicle = Chronicle(
            settings, owner.identity, lambda: owner.job, record, SystemClock()
        )
        self._responder = Responder(
            self._chronicle, record, policy_of(launch), agent=owner.id,
            patience=settings.verdict_deadline, catalog=catalog,
            points=self._chronicle.recovery_points, draw=random.random, mode=settings.on_fault,
            tell=self._notifier.tell,
        )  # fmt: skip
        self.proofs = Proofs()
        self.committed = -1
        self._next: DecisionRecord | None = None
        self._carried_out: DecisionRecord | None = None
        self._late: Decision | None = None
        self._claimed: int | None = None
        self._considered: tuple[str, ...] = ()
        self._case: Case | None = None
        self._began = math.inf
        self._slowest = 0.0
        self._tells_steps = False
        self._next_look = 0.0
        self._next_health = math.inf
        self._looked = 0.0
        self._nodes: dict[str, tuple[int, ...]] = {}
        self._own_node = ""
        self._told: set[tuple[str, str | None]] = set()

    # -- before an attempt

    def ready(self, names: tuple[str, ...], *, patience: float, spares: int) -> Decision:
        """What was decided of the attempt that comes, by this agent or by one before it.
        ``patience`` is for another owner to let go."""
        if self._next is not None:
            return Decision("restart", 0, self._next.reason, record=self._next)
        self._considered = names
        self._owner.take(patience=patience)
        last = self._chronicle.last_attempt()
        self.committed = last.committed if last is not None else -1
        decision = self._responder.begin(names, last, spares=spares)
        self._next = decision.record
        self._take_over()
        return decision

    def claim(self, *, patience: float, promise: bool = False) -> int:
        """Claim the next attempt. Where its number is not the one that was decided on, because
        another was claimed and not begun, that is recorded before it is begun."""
        attempt = self._owner.claim(patience=patience, promise=promise)
        points.reach("agent.claim.after_write")
        decided, self._next = self._next, None
        self._carried_out, self._claimed = decided, attempt
        if decided is not None and decided.begins != attempt:
            self._chronicle.write([newer(self._chronicle.read(), decided, attempt)])
        return attempt

    def asked(self) -> Asked:
        """What the decision that this attempt carries out asks of it."""
        decided = self._carried_out
        if decided is None:
            return Asked()
        waiting = self._responder.open
        return Asked(
            recover=decided.rung.recovery.point if decided.rung.recovery else None,
            skip=self._responder.skips(decided),
            replay_until=self._responder.replayed_step(decided),
            hold=max(0.0, waiting.due - time.monotonic()) if waiting is not None else 0.0,
        )

    def left_out(
        self, names: tuple[str, ...], decided: DecisionRecord, spares: int
    ) -> tuple[int, ...]:
        """The nodes of a round that were decided against, or are shut out, if as many others wait
        for their place; any other that has come since is as good as those that were meant."""
        against = set(self._considered) - set(decided.rung.nodes) | self._responder.excluded()
        out = tuple(node for node, name in enumerate(names) if name in against)
        return out if out and spares >= len(out) else ()

    def forget(self) -> None:
        """Another may lead from now on: what was decided is read from the history again, and what
        is open is looked at by whoever begins next."""
        self._next = self._late = self._claimed = None
        self._responder.open = None

    # -- while one runs

    def began(self, now: float, nodes: Mapping[str, tuple[int, ...]], own: str) -> None:
        """Its workers were started: ``nodes`` gives the ranks of each, ``own`` is this one."""
        self._began = self._looked = now
        self._nodes, self._own_node = dict(nodes), own
        self._told.clear()
        self._next_health = now + HEALTH_SECONDS
        self.proofs.started(now)

    @property
    def due(self) -> float:
        """When :meth:`settle` has something to do (CLOCK_MONOTONIC)."""
        waiting = self._responder.open
        overdue = self._next_look if self.proofs.any else math.inf
        late = waiting.due if waiting is not None else math.inf
        return min(late, self._falls_at, overdue, self._next_health)

    def settle(self) -> str:
        """Close the incident that is open, or give up a rung that led to no new step in time: why
        the attempt may not go on, an empty text where it may."""
        now = time.monotonic()
        self._next_look = now + OVERDUE_SECONDS
        self._conclude(self.proofs.overdue(now, self._chronicle.stamp()))
        if now >= self._next_health:
            self._look_at_health(now)
        waiting = self._responder.open
        if waiting is not None and now >= waiting.due:
            self._late = self._responder.settle(self._more(0.0))
        elif now >= self._falls_at and self._carried_out is not None:
            self._began = math.inf
            self._late = self._responder.fall(self._carried_out, self._considered)
        return "" if self._late is None else self._late.reason

    def _look_at_health(self, now: float) -> None:
        """Judge what this node's sources gave while its workers run: it ends nothing, but a person
        may want to know before something does."""
        self._next_health = now + HEALTH_SECONDS
        seen = self._evidence.telling(self._looked, self._began)
        self._looked = now
        if not seen:
            return
        named = (msgspec.structs.replace(s, node=s.node or self._own_node) for s in seen)
        incident = Incident(f"{self._record.attempt}-health", tuple(named), self._nodes)
        self._responder.watch_health(incident, self._told, leads=self._carried_out is not None)

    @property
    def is_settled(self) -> bool:
        """Whether no late verdict can change the attempt any more."""
        return self._responder.open is None

    @property
    def _falls_at(self) -> float:
        """When the rung that is tried counts as one that leads nowhere. Where steps are never
        told, nobody could say that there was none."""
        decided = self._carried_out
        waits = self._tells_steps and self.proofs.any and not self.proofs.has_stepped
        if decided is None or not decided.incident or not waits:
            return math.inf
        limit = max(decided.rung.timeout, RESUME_TIMES * self._slowest)
        return self._began + limit

    def proved(self, step: int) -> None:
        """``step`` is committed: what waited for it is proved (F7)."""
        self._conclude(self.proofs.committed(step, time.monotonic(), self._chronicle.stamp()))

    def differed(self) -> None:
        """The step that had failed was passed in an exact replay: a device is to be suspected."""
        decided = self._carried_out
        if decided is None or not decided.replay or not decided.incident:
            return
        result = ResultRecord(
            f"{decided.incident}.replay", decided.incident, self._record.attempt,
            self._chronicle.stamp(), replay_differed=True,
            node=self._responder.node_of(decided.incident),
        )  # fmt: skip
        self._chronicle.note(result)

    # -- after it

    def interrupted(self, word: LastWord) -> None:
        """A signal came between attempts: one that is claimed ends by it, and is no failure."""
        attempt, self._claimed = self._claimed, None
        if attempt is not None:
            self._responder.interrupted(attempt, word)

    def ended(self, *, took: float) -> None:
        """An attempt has ended; ``took`` is how long it took from its start to its first step,
        infinite where it came to none."""
        self.proofs.ended()
        if math.isfinite(took):
            self._slowest = max(self._slowest, took)

    def decide(self, case: Case) -> Decision:
        """What follows an attempt that has ended: what was decided while it ran, or a verdict."""
        self._tells_steps = self._tells_steps or case.end.attached
        self.committed = max(self.committed, case.end.committed)
        self._claimed = None
        if self._responder.open is not None:  # of the attempt before: what came since is its own
            self._late = self._responder.settle(self._more(0.0))
        late, self._late = self._late, None
        word = last_word(case.end)
        if late is None or (word is not None and not word.failed):
            now = time.monotonic()
            self._considered, self._case = case.plan.names(), case
            decision = self._responder.answer(case, self._more)
            self._try_to_prove(decision, case, ended=now)
        else:
            decision = late
        self._next = decision.record if decision.action == "restart" else None
        return decision

    def give_up(self) -> None:
        """The job stops: what was not proved was not got over."""
        self._conclude(self.proofs.give_up(self._chronicle.stamp()))

    def close(self) -> None:
        self._notifier.close()
        self._chronicle.close()

    def _take_over(self) -> None:
        """What waits for its proof, of attempts that another agent decided on, waits here."""
        now = time.monotonic()
        for incident, age in self._responder.unproved():
            if age < RESUME_WITHIN:
                then = now - age
                self.proofs.begin(incident, since=then, failed=then, ended=then, decided=then)

    def _try_to_prove(self, decision: Decision, case: Case, ended: float) -> None:
        if decision.action == "restart" and decision.incident is not None:
            self.proofs.begin(
                decision.incident, since=case.failed - case.age, failed=case.failed, ended=ended,
                decided=time.monotonic(),
            )  # fmt: skip

    def _more(self, seconds: float) -> tuple[Signal, ...]:
        """What else is learnt of the incident at hand within ``seconds``."""
        self._wait(seconds)
        case = self._case
        if case is None:
            return ()
        own = self._evidence.late(case.began, case.failed, case.plan.names()[0])
        return (*own, *case.others())

    def _conclude(self, results: list[ResultRecord]) -> None:
        for found in results:
            # It is told in the attempt that proves it: what is recorded of that one came before.
            result = msgspec.structs.replace(found, attempt=self._record.attempt)
            self._chronicle.note(result)
            history = fold(self._chronicle.known(), now=self._chronicle.stamp())
            outcome = outcome_of(history, result.incident)
            how = how_it_ended(outcome) if outcome else "its own record cannot be read any more"
            facts = msgspec.structs.asdict(result)
            for name in ("at", "attempt", "sequence"):
                del facts[name]
            self._record.say(
                "incident.ended", f"incident {result.incident}: {how}", level="debug", **facts
            )


class Late:
    """What may still change the attempt at hand; the keeper is told when nothing can."""

    def __init__(self, lead: Lead, release: Callable[[], None]) -> None:
        self._lead = lead
        self._release = release
        self._held = not lead.is_settled

    @property
    def due(self) -> float:
        return self._lead.due

    def settle(self) -> str:
        why = self._lead.settle()
        if self._held and self._lead.is_settled and not why:
            self._held = False
            self._release()
        return why


class Follower:
    """What an agent that does not lead still owes of a failure: what its node sees of it after its
    workers have ended (:class:`~everstep.agent.supervise.Provisional`). ``say`` takes it."""

    def __init__(
        self,
        evidence: Evidence,
        say: Callable[[tuple[Signal, ...]], None],
        *,
        began: float,
        failed: float,
        patience: float,
        name: str,
    ) -> None:
        self._evidence = evidence
        self._say = say
        self._began = began
        self._failed = failed
        self._name = name
        # Before the leader looks, which it does when the whole of its patience is over.
        self.due = failed + patience * LATE_SHARE

    def settle(self) -> str:
        """Tell it, once; whether the attempt may go on is the leader's affair."""
        self.due = math.inf
        seen = self._evidence.late(self._began, self._failed, self._name)
        if seen:
            self._say(seen)
        return ""

    def look(self) -> None:
        """Tell it if it is due."""
        if time.monotonic() >= self.due:
            self.settle()
