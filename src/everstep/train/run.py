"""The user's side: ``attach`` and the :class:`Run` it gives.

Owns: the loop, the step count, the order restore -> steps -> last checkpoint. Never does: decide
when to cut (the keeper of node 0 does, R2), copy or load bytes itself. Called by: the user's
script; integrations.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from everstep.core import exits
from everstep.core.settings import Settings, misspelt
from everstep.errors import EverstepError, NotDurable, UsageError
from everstep.keeper.identity import started_at
from everstep.train.boundary import Boundary, Preempted
from everstep.train.connect import Connection, connect
from everstep.train.data import DataFeed
from everstep.train.options import Options, check_claimed, effective, overruled, whole
from everstep.train.place import Place, read_place
from everstep.train.restore import Restorer
from everstep.train.session import Session
from everstep.train.voice import Voice, check_figures

LOADER = "loader"
"""The keyword whose object gives the batches of :meth:`Run.steps`."""


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
            hint="Name each object: attach(model=model, optimizer=optimizer). Only Options stand "
            "without a name.",
        )
    _check_objects(objects)
    options = options or Options()
    settings = effective(options, os.environ, sys.argv)
    place = read_place(
        os.environ, settings, process=_process(), ppid=os.getppid(), nth=_admit(settings)
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
        connection = connect(settings, place, voice)
        undo.pop_all()
    if not settings.attempt and (wrong := misspelt(os.environ)):
        voice.warn(wrong)
    for doubt in filter(None, doubts if place.rank == 0 else ()):
        voice.warn(doubt)
    return Run(session, connection, settings, place, feed, voice)


class Run:
    """One attempt of a training job, seen from one rank.

    ``step`` counts finished optimizer steps over all attempts. ``at_boundary`` is true while the
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
        self._boundary = Boundary(session, connection, settings, place)
        self._restorer = Restorer(session, connection, settings, place)
        self._open = True
        self._pid = os.getpid()
        _here.count += 1
        _here.open.add(_key(settings))
        atexit.register(self.close)

    def restore(self) -> int:
        """Put the newest recovery point back, once per attempt; gives the step to go on from.

        :meth:`steps` calls it; call it yourself only in a loop of your own. Raises
        :class:`~everstep.errors.RestoreError` where a recovery point is expected and none can be
        loaded; the job is then stopped, never started from scratch (R5).
        """
        self._check_open()
        if not self._restored:
            try:
                with self._boundary.before_the_first(), self._fatal_errors():
                    self.step = self._restorer.restore()
            except Preempted as stop:
                self._leave(stop.exit_code, str(stop))
            self._boundary.start(self.step, durable=self._restorer.durable)
            self._restored = True
        return self.step

    def steps(self, until: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield batches (or step numbers from 0, where no loader was attached) up to ``until``.

        ``until`` and the count are optimizer steps; each takes ``accumulate`` batches. The end of
        the loop's body is the step boundary. When the last step is done, its checkpoint is
        committed before the loop ends; a finished job yields nothing. Raises
        :class:`~everstep.errors.PendingGradients` where a boundary holds gradients that no
        optimizer step has used.
        """
        for name, value, least in (("until", until, 0), ("accumulate", accumulate, 1)):
            if not whole(value, least):
                raise UsageError(f"steps() needs a whole {name} >= {least}, not {value!r}.")
        self.restore()
        if self.step >= until:
            self._boundary.report_finished_before(self.step, until)
        while self.step < until:
            for micro in range(accumulate):
                self.at_boundary = micro == accumulate - 1
                yield from self._body()
            self._end_step()
        self._finish()

    def step_end(self) -> None:
        """Declare a step boundary: for a loop of your own, right after ``optimizer.step()``.

        A loop over :meth:`steps` ends its steps itself; only where it was left with ``break`` after
        a whole step does this declare that step's end.
        """
        self._check_restored("step_end()")
        if self._standing == "body":
            raise UsageError("step_end() came inside run.steps(), which ends the step by itself.")
        self._end_step()

    def checkpoint(self, *, wait: bool = False, timeout: float = 600.0) -> bool:
        """Cut this step now and make it durable in the background.

        Call it on every rank at the same step. In a loop over :meth:`steps` the cut is taken at
        the end of the body, because only there a step is whole; in a loop of your own it is taken
        at once, so call it right after :meth:`step_end`. ``wait`` waits there up to ``timeout`` s
        for the commit. The answer is whether the step is committed now (always False without
        ``wait``, and inside the body). A failing save never raises (R3): the event names the cause.
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

    def log(self, **values: Any) -> None:
        """Note figures of the step that is being computed (numbers or 0-d tensors).

        They go to the journal of events where one was asked for; a tensor is read only then,
        because reading it makes a device wait. Raises :class:`~everstep.errors.UsageError` for
        what is no figure.
        """
        check_figures(values)
        self._voice.log_values(self.step + 1, values)

    def close(self) -> None:
        """Release the keeper, the loader's iterator, hooks and signal handlers. Called at exit;
        may be called twice. The keeper keeps the snapshots."""
        if not self._open:
            return
        self._open = False
        if os.getpid() != self._pid:
            return  # a forked child that ends: the connection and the rest are the parent's
        _here.open.discard(_key(self._settings))
        atexit.unregister(self.close)
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
            raise

    def _end_step(self) -> None:
        self._check_open()
        self.step += 1
        self.at_boundary = False
        self._standing = "boundary"
        asked, self._asked_for = self._asked_for, None
        try:
            with self._fatal_errors():
                self._boundary.pass_step(self.step)
                if asked is not None:
                    self._boundary.checkpoint(self.step, wait=asked.wait, timeout=asked.timeout)
        except Preempted as stop:
            self._leave(stop.exit_code, str(stop))

    def _next(self) -> Any:
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


@dataclass
class _Here:
    """What this process has attached: how many runs ever, and the (store, job) of the open ones."""

    count: int = 0
    open: set[tuple[str, str]] = field(default_factory=set)


_here = _Here()


def _check_objects(objects: Mapping[str, Any]) -> None:
    if not objects:
        raise UsageError(
            "attach() was given nothing to keep.",
            hint="Name each object: attach(model=model, optimizer=optimizer).",
        )
    for keyword, held in objects.items():
        if isinstance(held, type):
            raise UsageError(
                f"attach({keyword}=...) was given the class {held.__qualname__}, which has no "
                "state of its own.",
                hint="Attach the object that is made of it.",
            )


def _key(settings: Settings) -> tuple[str, str]:
    return settings.store, settings.job


def _admit(settings: Settings) -> int:
    """How many runs this process has attached before. Raises :class:`UsageError` where the next
    one would take the place of a run: the keeper knows one worker a rank."""
    if _key(settings) in _here.open:
        raise UsageError(
            f"job {settings.job} is attached in this process already.",
            hint="Close the first run before you attach again.",
        )
    if _here.count and settings.attempt:
        raise UsageError(
            "this process has attached before, and its attempt can be restored only once.",
            hint="Under `everstep run` attach once in a process.",
        )
    return _here.count


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
