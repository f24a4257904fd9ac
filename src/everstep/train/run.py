"""The user's side: ``attach`` and the :class:`Run` it gives.

Owns: the loop, the step count, the order restore -> steps -> last checkpoint. Never does: decide
when to cut (the keeper of node 0 does, R2), copy or load bytes itself. Called by: the user's
script; integrations.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, NoReturn

from everstep.core import exits
from everstep.core.points import reach
from everstep.core.settings import Settings, misspelt
from everstep.errors import EverstepError, NotDurable, UsageError
from everstep.keeper.identity import started_at
from everstep.train.admission import admit, check_objects, closed, opened
from everstep.train.asked import Asked
from everstep.train.boundary import Boundary, Preempted
from everstep.train.calls import explained
from everstep.train.connect import Connection, connect
from everstep.train.data import DataFeed
from everstep.train.finite import Finite
from everstep.train.leaving import Leaving, ends_by_exception, left_in_order
from everstep.train.options import (
    Options,
    check_claimed,
    effective,
    overruled,
    phase_limit,
    phase_name,
    whole,
)
from everstep.train.place import Place, read_place
from everstep.train.restore import Restorer
from everstep.train.session import Session
from everstep.train.spoil import spoil_gradients
from everstep.train.stacks import answer
from everstep.train.voice import Voice, check_figures

LOADER = "loader"
"""The keyword whose object gives the batches of :meth:`Run.steps`."""


@explained("Name each object: everstep.attach(model=model, optimizer=optimizer).")
def attach(options: Options | None = None, /, **objects: Any) -> Run:
    """Put the training state into everstep's care. Call it before the first forward.

    Every keyword names an object with ``state_dict``/``load_state_dict``: modules (plain, DDP,
    FSDP2), optimizers, schedulers, scalers, EMA copies, your own. ``loader`` is the one that
    :meth:`Run.steps` draws batches from. The process group is found where there is one; the
    script may run under ``everstep run``, ``torchrun`` or plain ``python``.

    Raises :class:`~everstep.errors.UsageError` for objects that cannot be saved, naming each, and
    where this process has attached to the job before and may not do so again;
    :class:`~everstep.errors.JobOwned` where the job runs elsewhere.
    """
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            f"attach() was given a {type(options).__name__} without a keyword.",
            hint="Name each object: everstep.attach(model=model, optimizer=optimizer). Only "
            "Options stand without a name.",
        )
    check_objects(objects)
    options = options or Options()
    settings = effective(options, os.environ, sys.argv)
    place = read_place(
        os.environ, settings, process=_process(), ppid=os.getppid(), nth=admit(settings)
    )
    loader = objects.pop(LOADER, None)
    voice = Voice(settings, place)
    with ExitStack() as undo:
        undo.callback(voice.close)
        with _told_to_the_agent(settings, place, voice):
            check_claimed(options, settings)
            feed = _feed(loader, options, voice)
            session = Session(objects, place, options, feed)
            doubts = (overruled(options, settings), session.unsaved())
        undo.callback(session.close)
        finite = Finite(
            session.attached, session.since, place, voice.say, mode=settings.nonfinite,
            watched=options.watched,
        )  # fmt: skip
        connection = connect(settings, place, voice)
        undo.pop_all()
    if blind := answer(settings.stacks, place.rank):
        _tell_blind(voice, place, blind)
    if not settings.attempt and (wrong := misspelt(os.environ)):
        voice.warn(wrong)
    for doubt in filter(None, doubts if place.rank == 0 else ()):
        voice.warn(doubt)
    return Run(session, connection, settings, place, feed, voice, finite)


def _tell_blind(voice: Voice, place: Place, why: str) -> None:
    """One rank of a node warns: they share the folder."""
    voice.say(
        "train.warning", f"rank {place.rank} cannot be asked where it stands: {why}. Evidence of a "
        "hang will be poorer; training goes on. EVERSTEP_STATE_DIR names another folder.",
        level="debug" if place.local_rank else "warning",
    )  # fmt: skip


class Run:
    """One attempt of a training job, seen from one rank.

    ``step`` counts finished optimizer steps over all attempts: in the body of the loop over
    :meth:`steps` the step in hand is not among them yet. ``at_boundary`` is true while the
    body handles the last micro-batch of a step. As a context manager it closes itself.
    """

    def __init__(
        self,
        session: Session,
        connection: Connection,
        settings: Settings,
        place: Place,
        feed: DataFeed | None,
        voice: Voice,
        finite: Finite,
    ) -> None:
        self.step = 0
        self.at_boundary = False
        self._session = session
        self._connection = connection
        self._settings = settings
        self._feed = feed
        self._voice = voice
        self._finished = False
        self._restored = False
        self._batches: Iterator[Any] | None = None
        self._standing: _Standing = "boundary"
        self._asked_for: _Asked | None = None
        self._finite = finite
        self._asked = Asked(connection, session.since)
        self._boundary = Boundary(session, connection, settings, place, finite)
        self._restorer = Restorer(session, connection, settings, place)
        self._leaving = Leaving(session.since, self._boundary, voice, settings, place)
        self._counted = False
        self._error_before = getattr(sys, "last_value", None)
        self._open = True
        self._pid = os.getpid()
        opened(settings)
        atexit.register(self._exit)

    @explained("Call run.restore() once, before the first step.")
    def restore(self) -> int:
        """Put the newest recovery point back, once per attempt; gives the step to go on from.

        :meth:`steps` calls it; call it yourself only in a loop of your own. Raises
        :class:`~everstep.errors.RestoreError` where a recovery point is expected and none can be
        loaded; the job is then stopped, never started from scratch.
        """
        self._check_open()
        if not self._restored:
            try:
                with self._boundary.before_the_first(), self._fatal_errors():
                    self.step = self._restorer.restore()
                    self._asked.await_verdict()
            except Preempted as stop:
                self._leave(stop.exit_code, str(stop))
            self._boundary.start(self.step, durable=self._restorer.durable)
            self._session.since.start()
            spoil_gradients(self._session.attached, lambda: self.step + 1)
            self._finite.replay_until = self._connection.replay_until
            self._finite.start()
            self._restored = True
        return self.step

    @explained("Say up to which step: run.steps(until=50_000), over the job's whole life.")
    def steps(self, until: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield batches (or step numbers from 0, where no loader was attached) up to ``until``.

        ``until`` and the count are optimizer steps; each takes ``accumulate`` batches. The end of
        the loop's body is the step boundary. When the last step is done, its checkpoint is
        committed before the loop ends; a finished job yields nothing. Where the body is left by
        ``break`` or ``return`` after the optimizer has stepped, that step counts and is committed
        as well; all ranks must leave at the same step.

        Where a decision leaves the batches of a step out (they gave no finite values), they are
        drawn and not given to the body: the step counts, and no optimizer steps in it. Raises
        :class:`~everstep.errors.PendingGradients` where a boundary holds gradients that no
        optimizer step has used, :class:`~everstep.errors.NonFinite` where a logged figure or a
        parameter is no finite number.
        """
        for name, value, least in (("until", until, 0), ("accumulate", accumulate, 1)):
            if not whole(value, least):
                raise UsageError(f"steps() needs a whole {name} >= {least}, not {value!r}.")
        self._leaving.until = until
        self.restore()
        self._finished = False  # a loop before may have had a smaller until
        while self.step < until:
            if self._asked.leaves_out(self.step + 1):
                with self._fatal_errors():
                    drawn = accumulate if self._feed is not None else 0
                    self._asked.leave_out(self.step + 1, drawn, self._next)
            else:
                for micro in range(accumulate):
                    self.at_boundary = micro == accumulate - 1
                    yield from self._body()
            self._end_step()
        self._finish()

    @explained("Call run.step_end() after each step.")
    def step_end(self) -> None:
        """Declare a step boundary: for a loop of your own, right after ``optimizer.step()``.

        A loop over :meth:`steps` ends its steps itself. Where it was left by ``break`` and could
        not know that the step was whole, this declares it.
        """
        self._check_restored("step_end()")
        counted, self._counted = self._counted, False
        if counted and not self._session.since.stepped:
            return  # the end of this step was known when the loop was left
        if self._standing == "body":
            raise UsageError("step_end() came inside run.steps(), which ends the step by itself.")
        with self._fatal_errors():
            self._asked.check_ended(self.step + 1)
        self._end_step()

    @explained("Ask run.skips(run.step + 1) before the step's batches are used.")
    def skips(self, step: int) -> bool:
        """Whether the batches of ``step`` (the first is 1) are to be left out, because a decision
        says that they give no finite values and the user allows it.

        For a loop of your own: draw them, throw them away, do no optimizer step, and call
        :meth:`step_end`. A loop that does not ask ends with an error where a step is to be left
        out. :meth:`steps` does it by itself.
        """
        self._check_restored("skips()")
        return self._asked.loop_asks(step)

    @explained("run.checkpoint(wait=True, timeout=600.0)")
    def checkpoint(self, *, wait: bool = False, timeout: float = 600.0) -> bool:
        """Cut this step now and make it durable in the background.

        Call it on every rank at the same step. In a loop over :meth:`steps` the cut is taken at
        the end of the body, because only there a step is whole; in a loop of your own it is taken
        at once, so call it right after :meth:`step_end`. ``wait`` waits there up to ``timeout`` s
        for the commit. The answer is whether the step is committed now (always False without
        ``wait``, and inside the body). A save that fails never raises: an event names the cause. A
        state that is not a number is no save that fails: :class:`~everstep.errors.NonFinite`.
        """
        self._check_restored("checkpoint()")
        if self._standing == "left":
            raise UsageError(
                f"checkpoint() came after the loop was left within step {self.step + 1}, and "
                "half a step is never saved.",
                hint="Where that step is complete, call run.step_end() first.",
            )
        if self._standing == "body":
            self._asked_for = _Asked(wait, timeout)
            return False
        with self._fatal_errors():
            return self._boundary.checkpoint(self.step, wait=wait, timeout=timeout)

    @explained('with run.long_phase("evaluation", limit="20min"): ...')
    def long_phase(
        self, name: str, limit: float | str | None = None
    ) -> AbstractContextManager[None]:
        """Declare that what follows takes long by right: ``with run.long_phase("evaluation"): ...``

        Without a word a rank that ends no step for long is looked at, and ended as hanging where
        nothing in it moves. While one rank is in a phase, nobody waits in vain: the others may
        stand in a barrier until it comes. ``name`` is told to whoever asks what the job does (at
        most 48 bytes). ``limit`` is seconds, or text such as ``"20min"``: for longer the phase is
        no excuse. Without a limit it is one for an hour, and then as long as anything moves. May
        be nested; the innermost counts. Raises :class:`~everstep.errors.UsageError` for a name or a
        limit that cannot be.
        """
        self._check_open()
        return self._connection.phases.within(phase_name(name), phase_limit(limit))

    @explained("Name each figure: run.log(loss=loss).")
    def log(self, **values: Any) -> None:
        """Note figures of the step that is being computed (numbers or 0-d tensors).

        They go to the journal of events where one was asked for; a tensor is read only then,
        because reading it makes a device wait. ``loss`` and ``grad_norm`` (or what
        ``Options(watched=...)`` names) must be finite in a step that an optimizer uses: they are
        looked at when the step ends, those on a device without waiting for it. Raises
        :class:`~everstep.errors.UsageError` for what is no figure.
        """
        check_figures(values)
        self._finite.note(values)
        self._voice.log_values(self.step + 1, values)

    def close(self) -> None:
        """Release the keeper, the loader's iterator, hooks and signal handlers. Called at exit;
        may be called twice. The keeper keeps the snapshots.

        Where steps were done and the last one is not committed, it is now, or a warning says why
        not; but nothing is saved on the way of an exception."""
        self._close(exiting=False)

    def _exit(self) -> None:
        self._close(exiting=True)

    def _close(self, *, exiting: bool) -> None:
        if not self._open:
            return
        if os.getpid() != self._pid:
            self._open = False
            return  # a forked child that ends: the connection and the rest are the parent's
        if self._finished and self._leaving.until is not None:
            self._boundary.report_finished(self.step, self._leaving.until)
        elif self._finite.found is None and not ends_by_exception(self._error_before):
            self._leaving.close(
                self.step, restored=self._restored, in_body=self._standing != "boundary",
                exiting=exiting,
            )  # fmt: skip
        self._open = False
        closed(self._settings)
        atexit.unregister(self._exit)
        with ExitStack() as each:  # the last one first, and all of them
            each.callback(self._connection.close, finished=self._finished)
            if self._feed is not None:
                each.callback(self._feed.close)
            each.callback(self._session.close)
            each.callback(self._boundary.close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _body(self) -> Iterator[Any]:
        """One turn of the user's body."""
        with self._fatal_errors():
            batch = self._next()
        self._standing = "body"
        try:
            yield batch
        except GeneratorExit:
            self._standing = "left"
            if self._open and os.getpid() == self._pid and left_in_order(sys._getframe(1)):
                self._left()
            raise

    def _left(self) -> None:
        """The body was left by ``break`` or ``return``: what it has finished is kept."""
        if not (self.at_boundary and self._session.since.is_whole()):
            self._leaving.save_boundary(self.step)
            return
        self._pass_boundary()
        self._counted = True
        committed = self._leaving.count_step(self.step)
        self._finished = committed and self.step == self._leaving.until

    def _pass_boundary(self) -> None:
        self.step += 1
        self.at_boundary = False
        self._standing = "boundary"

    def _end_step(self) -> None:
        self._check_open()
        self._pass_boundary()
        asked, self._asked_for = self._asked_for, None
        reach("train.step.before_boundary", self.step)
        try:
            with self._fatal_errors():
                self._boundary.pass_step(self.step)
                self._session.since.boundary()
                if asked is not None:
                    self._boundary.checkpoint(self.step, wait=asked.wait, timeout=asked.timeout)
        except Preempted as stop:
            self._leave(stop.exit_code, str(stop))

    def _next(self) -> Any:
        reach("train.data.before_batch", self.step + 1)
        if self._feed is None:
            return self.step
        if self._batches is None:
            self._batches = self._feed.batches()
        return next(self._batches)

    def _finish(self) -> None:
        try:
            self._boundary.finish(self.step, self._settings.final_deadline)
        except NotDurable as late:
            self._leave(exits.NOT_DURABLE, str(late))
        self._finished = True

    def _leave(self, exit_code: int, why: str) -> NoReturn:
        quiet = exit_code == exits.PREEMPTED
        self._voice.say("train.left", why, level="info" if quiet else "error", loud=True)
        self.close()
        raise SystemExit(exit_code)

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError("this run is closed.", hint="Attach again in a new process.")

    def _check_restored(self, call: str) -> None:
        self._check_open()
        if not self._restored:
            raise UsageError(f"{call} came before restore().", hint="Call run.restore() first.")

    def _fatal_errors(self) -> _Fatal:
        return _Fatal(self._connection)


_Standing = Literal["boundary", "body", "left"]
"""Where the user's code is: between two steps, in a body of the loop, or out of it by ``break``."""


class _Asked(NamedTuple):
    """A checkpoint that was asked for in the body."""

    wait: bool
    timeout: float


class _Fatal:
    """Tells the agent that a restart cannot help before the error leaves this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EverstepError) and not error.retryable:
            self._connection.fatal(error)


@contextmanager
def _told_to_the_agent(settings: Settings, place: Place, voice: Voice) -> Iterator[None]:
    """What the user has to change is no reason for the agent to try again."""
    try:
        yield
    except UsageError as refused:
        if settings.attempt:
            connection = connect(settings, place, voice)
            connection.fatal(refused)
            connection.close(finished=False)
        raise


def _process() -> str:
    """This process, also after its pid is used again."""
    return f"{os.getpid()}-{started_at(os.getpid())}"


def _feed(loader: Any, options: Options, voice: Voice) -> DataFeed | None:
    if loader is None:
        return None
    return DataFeed(
        loader,
        name=LOADER,
        inexact=options.inexact_data,
        deterministic_dataset=options.deterministic_dataset,
        on_progress=voice.report_replay,
        on_warning=voice.warn,
    )
