"""What happens at a step boundary: post it, obey a stop, take the published cut.

Owns: the order of these and the decision what a failing cut means here (R1 and values that are no
numbers raise, everything else is reported and training goes on, R3). Never does: choose the step
of a cut (R2). Called by: :class:`everstep.train.run.Run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep.core import exits
from everstep.core.events import counted
from everstep.core.settings import Settings, variable
from everstep.errors import (
    EverstepError,
    JobOwned,
    MemoryTooSmall,
    NonFinite,
    NotDurable,
    PendingGradients,
    RestoreError,
)
from everstep.train.connect import Connection
from everstep.train.cut import Cutter
from everstep.train.finite import Finite
from everstep.train.phases import FIRST_STEP, RESTORE, SAVE, STEP
from everstep.train.place import Place
from everstep.train.session import Session
from everstep.train.since import Beside
from everstep.train.stop import TermFlag, Terminated

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
"""Seconds between two tries to cut the last step."""

_LONG_WAIT_SECONDS = 10.0
"""For a checkpoint at the end: after that a person is told what is waited for."""

_TELL_TERM_SECONDS = 0.5

_POLL = 0.002
"""Seconds between two looks at what cannot be waited on: a stop that is being agreed on, a keeper
that is not there yet."""

_READY_AGAIN_SECONDS = 1.0

_LATE_SECONDS = 60.0
"""What a save that was given a time may take beyond it before it is no excuse for no step."""


class Preempted(Exception):
    """The job was asked to stop and this rank has done its part; carries the exit code."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


class Boundary:
    """The boundaries of one attempt on one rank."""

    def __init__(
        self,
        session: Session,
        connection: Connection,
        settings: Settings,
        place: Place,
        finite: Finite,
    ) -> None:
        self._finite = finite
        self._session = session
        self._connection = connection
        self._settings = settings
        self._place = place
        self._phases = connection.phases
        self._cutter = Cutter(session, connection, place)
        self._term = TermFlag()
        self._term_since: float | None = None
        self._tell_term_at = 0.0
        self._cut_seen = (0, 0)
        self._durable_step = -1
        self._step_began = time.monotonic_ns()
        self._first = True
        self._ready_again_at = 0.0

    @contextmanager
    def before_the_first(self) -> Iterator[None]:
        """In here a SIGTERM raises :class:`Preempted` at once: there is no step to end."""
        self._phases.become(RESTORE)
        try:
            with self._term.at_once():
                yield
        except Terminated:
            raise Preempted("stopped before the first step", exits.PREEMPTED) from None

    def start(self, step: int, *, durable: bool) -> None:
        """Training begins at ``step``; ``durable`` says that the store already holds it."""
        self._durable_step = step if durable else -1
        self._restored_step = step
        self._data_from = self._session.at_batch
        self._step_began = time.monotonic_ns()
        self._phases.become(FIRST_STEP)
        self._phases.take_declared()
        self._phases.watch_compiler()
        self._connection.post_boundary(step, self._step_began, 0)

    def pass_step(self, step: int) -> None:
        """``step`` is finished. Raises :class:`Preempted` where the job stops here,
        :class:`PendingGradients` (R1), :class:`NonFinite` where it gave no numbers,
        :class:`RestoreError` where it does not continue what was restored (F7), and
        :class:`JobOwned` where another has taken the job over."""
        if self._first:
            self._check_continues(step)
        self._finite.look(step)  # before anybody may take it for a boundary
        now = time.monotonic_ns()
        self._connection.post_boundary(step, now, now - self._step_began)
        self._connection.post_pace(now - self._step_began - self._phases.take_declared())
        if self._first:
            self._first = False
            self._phases.become(STEP)
            self._phases.watch_compiler()  # the first step may have loaded it
            self._say_resumed(step)
        self._session.check_gradients(step)
        here = self._connection.keep_alive()
        if here:
            self._make_ready(step)
        self._obey_stop(step)
        if here:  # what a dead keeper has published, a new one does not know of
            self._obey_cut(step)
        self._phases.take_declared()
        self._step_began = time.monotonic_ns()

    def checkpoint(self, step: int, *, wait: bool, timeout: float) -> bool:
        """Cut and persist ``step`` now; see :meth:`everstep.train.run.Run.checkpoint`."""
        deadline = time.monotonic() + timeout
        with self._phases.within(SAVE, timeout + _LATE_SECONDS if wait else 0.0):
            if self._durable_step != step:
                self._session.check_gradients(step)
                if not self._try_cut(step, persist=True, slot_timeout=timeout if wait else 0.5):
                    return False
            if not wait:
                return self._durable_step == step
            return self._await(step, deadline) is None

    def finish(self, step: int, deadline_seconds: float) -> None:
        """Commit the last step. Raises :class:`NotDurable` after ``deadline_seconds``."""
        if step == self._restored_step:
            self._await(step, time.monotonic())  # a finished job that is started again
        with self._phases.within(SAVE, deadline_seconds + _LATE_SECONDS):
            why = self._commit(step, time.monotonic() + deadline_seconds)
        if why is not None:
            raise NotDurable(
                f"rank {self._place.rank}: the checkpoint of the last step {step} is not "
                f"committed after {deadline_seconds:g} s: {why}.",
                hint="What the keeper holds it goes on trying to store; start the job again "
                "to wait for it.",
            )

    def keep(
        self,
        step: int,
        beside: Beside | None,
        seconds: float,
        on_wait: Callable[[], None],
        *,
        cut: bool,
    ) -> str | None:
        """Commit ``step``, at which the loop was left: None, or why it is not after ``seconds``.

        ``beside`` is what was read at the boundary, where more was drawn or fetched since.
        ``on_wait`` is called where it takes long. ``cut``: the state is that step's still; else
        only a cut of before can be made durable. Never raises (R3)."""
        deadline = time.monotonic() + seconds
        first = min(deadline, time.monotonic() + _LONG_WAIT_SECONDS)
        try:
            save = self._phases.within(SAVE, seconds + _LATE_SECONDS)
            with save, self._session.as_of(beside):
                if self._cutter.holds(step) and self._await(step, first) is None:
                    return None
                commit = self._commit if cut else self._await
                if commit(step, first) is None:
                    return None
                if first < deadline:
                    on_wait()
                return commit(step, deadline)
        except EverstepError as failed:
            return str(failed)

    def holds(self, step: int) -> bool:
        """Whether the newest cut is of ``step``."""
        return self._cutter.holds(step)

    def is_durable(self, step: int) -> bool:
        """Whether ``step`` is known to be committed."""
        return self._durable_step == step

    def report_finished(self, step: int, until: int) -> None:
        """The run ends at ``until``; where it was there when it was started, nothing was done."""
        if step == self._restored_step:
            self._report_finished_before(step, until)
        self._connection.finished(step, told=step == self._restored_step)

    def _report_finished_before(self, step: int, until: int) -> None:
        self._connection.say(
            "train.nothing_to_do",
            f"nothing is left to do: job {self._settings.job} has done {counted(step, 'step')}, "
            f"`until` is {until}. To continue it, give it a larger `until` under the same name "
            f"({self._how_to_name()})",
            step=step,
            loud=True,
            until=until,
        )

    def _how_to_name(self) -> str:
        flag = "--job " if self._settings.attempt else f"{variable('job')}="
        return flag + self._settings.job

    def close(self) -> None:
        self._term.close()
        self._cutter.close()

    # -- the first step

    def _check_continues(self, step: int) -> None:
        """Before anybody takes it for a boundary: a cut of it would be a state of another step."""
        if step != self._restored_step + 1:
            raise RestoreError(
                f"rank {self._place.rank}: the first step that was done is {step}, though step "
                f"{self._restored_step} was restored, so that {self._restored_step + 1} follows. "
                "Nothing of it is saved.",
                hint="run.step is everstep's to count: do not set it. Where the script does not, "
                "this is a defect of everstep: please report it.",
            )

    def _say_resumed(self, step: int) -> None:
        """F7: what the proof of resume rests on. ``figures`` are those that must be finite;
        where one was not, this is never said."""
        self._connection.say(
            "train.resumed", f"step {step} is done", step=step, restored=self._restored_step,
            figures=self._finite.figures, data_from=self._data_from, data=self._session.at_batch,
        )  # fmt: skip

    # -- cuts

    def _make_ready(self, step: int) -> None:
        """Open the slots at the first boundary, when the optimizer's state exists; where that
        fails for want of memory, stop while nothing is lost. Another failure (the keeper died
        in between) is tried again a little later: without slots nothing is ever cut."""
        if self._cutter.ready or time.monotonic() < self._ready_again_at:
            return
        self._ready_again_at = time.monotonic() + _READY_AGAIN_SECONDS
        try:
            with self._phases.within(SAVE, _LATE_SECONDS):
                self._cutter.make_ready(step)
        except MemoryTooSmall as small:
            self._refuse_small_memory(step, small)
        except Exception as failed:  # noqa: BLE001 - the objects' state_dict is user code (R3)
            self._connection.cut_failed(step, failed)

    def _obey_cut(self, step: int) -> None:
        sequence, wanted = self._connection.published_cut()
        published = (self._connection.keepers_met(), sequence)
        if published == self._cut_seen or sequence == 0:
            return
        if wanted == step:
            self._cut_seen = published
            index = self._connection.published_slot(step)
            if index is not None:
                with self._phases.within(SAVE):
                    self._try_cut(step, persist=False, index=index, sequence=sequence)
        elif wanted < step:
            self._cut_seen = published
            self._connection.cut_skipped(wanted, f"learnt of it at step {step}", sequence)

    def _try_cut(
        self,
        step: int,
        *,
        persist: bool,
        index: int | None = None,
        sequence: int = 0,
        slot_timeout: float = 0.0,
    ) -> bool:
        deadline = time.monotonic() + slot_timeout
        try:
            if index is None:
                self._await_keeper(deadline)
            self._cutter.make_ready(step)
            if index is None:
                left = max(deadline - time.monotonic(), 0.0)
                index, sequence = self._connection.ask_slot(step, left) or (None, 0)
            if index is None:
                self._connection.say(
                    "cut.no_slot", f"no slot came free for step {step}", step=step, level="warning"
                )
                return False
            self._cut(step, index, persist=persist, sequence=sequence)
        except (PendingGradients, JobOwned, NonFinite):
            raise
        except MemoryTooSmall as small:
            self._refuse_small_memory(step, small, sequence)
            return False
        except Exception as failed:  # noqa: BLE001 - the objects' state_dict is user code (R3)
            self._connection.cut_failed(step, failed, sequence)
            return False
        return True

    def _cut(self, step: int, index: int, *, persist: bool, sequence: int) -> None:
        began = time.monotonic()
        health = self._finite.before_cut(step, nbytes=self._cutter.nbytes, whole=persist)
        self._cutter.cut(
            step, index, persist=persist, sequence=sequence, health=health, began=began
        )
        self._finite.cut_taken()

    def _await_keeper(self, deadline: float) -> None:
        """Where the keeper is away, take the steps of the way back until it is here."""
        while not self._connection.keep_alive() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _cut_and_await(self, step: int, deadline: float) -> str | None:
        """None once ``step`` is durable, else why it is not."""
        left = max(deadline - time.monotonic(), 0.1)
        if not self._try_cut(step, persist=True, slot_timeout=min(left, 30.0)):
            return "it could not be cut, an event says why"
        return self._await(step, deadline)

    def _commit(self, step: int, deadline: float) -> str | None:
        """None once ``step`` is durable, else why it is not by ``deadline``. A cut that fails or
        is dropped is taken anew: the state is as it was."""
        pause = _FIRST_PAUSE
        while self._durable_step != step:
            why = self._cut_and_await(step, deadline)
            if why is not None:
                if time.monotonic() >= deadline:
                    return why
                time.sleep(max(min(pause, deadline - time.monotonic()), 0.0))
                pause = min(2 * pause, _LAST_PAUSE)
        return None

    def _refuse_small_memory(self, step: int, small: MemoryTooSmall, sequence: int = 0) -> None:
        if not self._cutter.ever_cut:
            # Nothing is lost yet: better to stop at once than to train without any protection.
            raise small
        self._connection.cut_failed(step, small, sequence)

    def _await(self, step: int, deadline: float) -> str | None:
        """None once ``step`` is durable, else why it is not."""
        left = max(deadline - time.monotonic(), 0.0)
        why = self._connection.await_durable(step, left)
        if why is None:
            self._durable_step = step
        return why

    # -- stops

    def _obey_stop(self, step: int) -> None:
        requested, stop_step, _ = self._connection.published_stop()
        if self._term.raised and not requested:
            self._pass_on_term(step)
        if requested and step >= stop_step:
            self._stop_here(step)

    def _pass_on_term(self, step: int) -> None:
        """Tell the keeper until the stop is published: it may be dead and come again."""
        now = time.monotonic()
        if self._term_since is None:
            self._term_since = now
        if now - self._term_since > self._settings.grace:
            raise Preempted(
                f"stopped at step {step} without a cut: the keeper did not answer in "
                f"{self._settings.grace:g} s",
                exits.PREEMPTED,
            )
        if now >= self._tell_term_at:
            self._tell_term_at = now + _TELL_TERM_SECONDS
            self._connection.preempt(self._settings.grace)

    def _stop_here(self, step: int) -> None:
        began = time.monotonic() if self._term_since is None else self._term_since
        deadline = began + self._settings.grace
        with self._phases.within(SAVE, self._settings.grace + _LATE_SECONDS):
            self._meet_and_leave(step, deadline)

    def _meet_and_leave(self, step: int, deadline: float) -> None:
        told = 0
        while time.monotonic() < deadline:
            # Each keeper must hear it: the one before may be dead.
            if told != self._connection.keepers_met() and self._connection.arrived(step):
                told = self._connection.keepers_met()
            _, stop_step, final = self._connection.published_stop()
            if stop_step > step:
                return  # another rank is further: run on to its step
            if final and stop_step == step:
                self._persist_and_leave(step, deadline)
            if final:
                raise Preempted(
                    f"stopped at step {step} without a common cut: the ranks cannot meet any more",
                    exits.PREEMPTED,
                )
            self._connection.keep_alive()
            time.sleep(_POLL)
        raise Preempted(
            f"stopped at step {step} without a common cut: the ranks did not meet in "
            f"{self._settings.grace:g} s",
            exits.PREEMPTED,
        )

    def _persist_and_leave(self, step: int, deadline: float) -> None:
        why: str | None = "already durable"
        if self._durable_step != step:
            self._try_cut(step, persist=True, slot_timeout=deadline - time.monotonic())
            why = self._await(step, deadline)
        told = f"stopped at step {step}; " + (
            f"not durable yet ({why})" if why and self._durable_step != step else "it is committed"
        )
        raise Preempted(told, exits.PREEMPTED)
