"""Drives one run: follows its events, injects each fault when it is due, starts it again.

Owns: the loop. Never does: judge (judge does), decide the times (plan does). Called by: drill.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from everstep.core.events import Event
from everstep.drill import kinds, processes
from everstep.drill.damage import flip_newest
from everstep.drill.job import Job
from everstep.drill.judge import ORPHAN_LIMIT, Injection, injection_of, overcome
from everstep.drill.plan import COMMITS_NEEDED, OF_STORE, Planned, draw_rank
from everstep.drill.progress import Progress
from everstep.drill.result import RunReport
from everstep.drill.storefault import StoreFault
from everstep.errors import DrillError

TICK = 0.01
"""Seconds between looks at the journal. Times in reports come from the events' own clocks."""
DEATH_SECONDS = 10.0

Tell = Callable[[Event], None]


class Drive:
    """One run from its first start to its end, with the faults of ``planned``.

    ``patience`` is how many seconds one fault may take to be overcome, and the run may be silent.
    """

    def __init__(
        self, job: Job, planned: Sequence[Planned], *, seed: int, patience: float, tell: Tell
    ) -> None:
        self.events: list[Event] = []
        self._job = job
        self._ahead = [plan for plan in planned if plan.fault.point is None]
        self._by_point = {plan.index: plan for plan in planned if plan.fault.point is not None}
        self._seed = seed
        self._patience = patience
        self._tell = tell
        self._progress = Progress()
        self._current: Injection | None = None
        self._base = 0
        self._heard = time.monotonic()
        self._problems: list[str] = []
        self._store_fault = StoreFault(job.setup.folder)

    def run(self) -> RunReport:
        """Run to the end; whatever happens, no process of the run is left."""
        began = time.monotonic()
        try:
            self._job.start()
            while (code := self._turn()) is None:
                time.sleep(TICK)
            seconds = time.monotonic() - began
            if code == 0:
                self._wait_for_quiet()
            self._read()
            return self._report(code, seconds)
        finally:
            self._job.end()

    # -- one look

    def _turn(self) -> int | None:
        """The run's exit code once it is over."""
        self._read()
        for index, mono in self._job.fired():
            self._point_fired(self._by_point.pop(index), mono)
        code = self._job.poll()
        if code is not None:
            return self._launcher_ended(code)
        if self._current is not None:
            self._look_after(self._current)
        elif self._ahead and self._due(self._ahead[0]):
            self._inject(self._ahead.pop(0))
        return self._lost_patience()

    def _read(self) -> None:
        for event in self._job.journal.read_new():
            self.events.append(event)
            self._progress.feed(event)
            self._tell(event)
            self._heard = time.monotonic()

    def _launcher_ended(self, code: int) -> int | None:
        current = self._current
        if current is not None and current.kind == "agent" and code < 0:
            self._note(kinds.NOTICED, "the agent died at a named point")
            self._start_again()
            return None
        if code != 0:
            self._problems.append(f"`everstep run` ended with {code}; see {self._job.log}")
        return code

    def _look_after(self, current: Injection) -> None:
        if current.kind in OF_STORE and self._store_fault.active and self._failed_save(current):
            self._store_fault.release()
            self._note(kinds.RELEASED, "the store works again")
        if overcome(current, self.events):
            self._current, self._base = None, self._progress.step

    def _failed_save(self, current: Injection) -> bool:
        return any(e.kind == kinds.PERSIST_FAILED and e.mono >= current.mono for e in self.events)

    def _lost_patience(self) -> int | None:
        now, current = time.monotonic(), self._current
        if current is not None and now - current.mono > self._patience:
            self._problems.append(f"{current.fault} was not overcome in {self._patience:g} s")
        elif now - self._heard > self._patience:
            self._problems.append(f"no event came for {self._patience:g} s")
        else:
            return None
        self._job.end()
        return self._job.wait(DEATH_SECONDS)

    # -- faults

    def _due(self, plan: Planned) -> bool:
        progress = self._progress
        at = self._base + plan.gap if plan.step is None else plan.step
        ready = bool(progress.workers and progress.keeper and progress.kept.snapshot)
        enough = len(progress.kept.commits) >= COMMITS_NEEDED.get(plan.fault.kind, 0)
        return ready and enough and progress.step >= at

    def _inject(self, plan: Planned) -> None:
        kind = plan.fault.kind
        if kind in OF_STORE:
            self._injected(plan, f"{kind} at the store")
            self._store_fault.begin(kind)
        elif kind == "agent":
            self._kill_agent(plan)
        elif kind in ("everything", "corrupt"):
            self._kill_everything(plan)
        else:
            self._kill_one(plan)

    def _kill_one(self, plan: Planned) -> None:
        """SIGKILL to a worker or the keeper; put off where it happens to be gone."""
        rank = None
        pid = self._progress.keeper
        if plan.fault.kind == "worker":
            ranks = sorted(self._progress.workers)
            rank = draw_rank(plan.fault, ranks, seed=self._seed, index=plan.index)
            pid = self._progress.workers[rank]
        what = "the keeper" if rank is None else f"rank {rank}"
        try:
            with processes.held(pid, self._job.mark) as fd:
                now = time.monotonic()
                processes.strike(fd)
                self._injected(plan, f"SIGKILL to {what} (pid {pid})", rank=rank, mono=now)
        except processes.Gone:
            self._ahead.insert(0, plan)

    def _kill_agent(self, plan: Planned) -> None:
        with ExitStack() as stack:
            fds = self._hold_workers(stack)
            agent = self._job.agent_pid
            fd = stack.enter_context(processes.held(agent, self._job.mark))
            killed = self._injected(plan, f"SIGKILL to the agent (pid {agent})")
            processes.strike(fd)
            self._await_death()
            self._start_again()
            ended = [
                processes.wait_end(worker, killed + ORPHAN_LIMIT - time.monotonic())
                for worker in fds
            ]
        seconds = round(time.monotonic() - killed, 3) if all(ended) else None
        self._note(kinds.ORPHANS, "workers of the dead agent are gone", seconds=seconds)

    def _kill_everything(self, plan: Planned) -> None:
        began = time.monotonic()
        killed = processes.kill_all(self._job.mark, timeout=DEATH_SECONDS)
        self._await_death(note=False)
        self._read()
        what, damaged = f"SIGKILL to all {killed} processes", None
        if plan.fault.kind == "corrupt":
            damage = flip_newest(
                self._job.setup.store, self._job.setup.job, seed=self._seed + plan.index
            )
            what, damaged = f"{what}; {damage.text}", damage.point.step
        self._injected(plan, what, damaged=damaged, mono=began)
        self._note(kinds.NOTICED, "the launcher is gone")
        self._progress.workers, self._progress.keeper = {}, 0
        self._start_again()

    def _point_fired(self, plan: Planned, mono: float) -> None:
        self._injected(plan, f"SIGKILL at {plan.fault.point}", rank=plan.fault.rank, mono=mono)

    def _hold_workers(self, stack: ExitStack) -> list[int]:
        fds = []
        for pid in self._progress.workers.values():
            with contextlib.suppress(processes.Gone):
                fds.append(stack.enter_context(processes.held(pid, self._job.mark)))
        return fds

    def _await_death(self, *, note: bool = True) -> None:
        try:
            self._job.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            raise DrillError(f"the launcher survived SIGKILL for {DEATH_SECONDS:g} s.") from None
        if note:
            self._note(kinds.NOTICED, "the launcher is gone")

    def _start_again(self) -> None:
        self._job.start()
        self._note(kinds.STARTED, "the job is started again", pid=self._job.agent_pid)

    # -- words

    def _injected(
        self,
        plan: Planned,
        text: str,
        *,
        rank: int | None = None,
        damaged: int | None = None,
        mono: float | None = None,
    ) -> float:
        """Record the fault; its time is the moment just before it is done."""
        facts = {"index": plan.index, "kind": plan.fault.kind, "fault": str(plan.fault)}
        event = self._event(kinds.INJECTED, text, facts | {"damaged": damaged}, mono, rank)
        self._job.note(event)
        self._current = injection_of(event)
        return event.mono

    def _note(self, kind: str, text: str, **facts: object) -> None:
        self._job.note(self._event(kind, text, facts, None, None))

    def _event(
        self, kind: str, text: str, facts: dict[str, object], mono: float | None, rank: int | None
    ) -> Event:
        now = time.monotonic()
        at = now if mono is None else mono
        return Event(
            wall=time.time() - (now - at),
            mono=at,
            source="drill",
            kind=kind,
            text=text,
            job=self._job.setup.job,
            attempt=self._progress.attempt,
            rank=rank,
            step=self._progress.step,
            facts=facts,
        )

    # -- the end

    def _wait_for_quiet(self) -> None:
        left = self._job.linger()
        if left:
            names = ", ".join(f"{pid} ({_name(pid)})" for pid in left)
            self._problems.append(f"processes outlived the finished run: {names}")

    def _report(self, code: int, seconds: float) -> RunReport:
        return RunReport(
            job=self._job.setup.job,
            store=self._job.setup.store,
            exit_code=code,
            seconds=round(seconds, 3),
            attempts=self._progress.attempt,
            last_step=max(
                (e.step or 0 for e in self.events if e.kind in kinds.PROGRESS), default=0
            ),
            journal=str(self._job.journal.path),
            problems=tuple(self._problems),
        )


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "gone meanwhile"
