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
from typing import Any

from everstep.core import exits
from everstep.core.settings import Settings
from everstep.errors import EverstepError, NotDurable, UsageError
from everstep.train.boundary import Boundary, Preempted
from everstep.train.connect import Connection, connect
from everstep.train.data import DataFeed
from everstep.train.options import Options, effective
from everstep.train.place import Place, read_place
from everstep.train.restore import Restorer
from everstep.train.session import Session
from everstep.train.voice import Voice

LOADER = "loader"
"""The keyword whose object gives the batches of :meth:`Run.steps`."""


def attach(options: Options | None = None, /, **objects: Any) -> Run:
    """Put the training state into everstep's care. Call it before the first forward.

    Every keyword names an object with ``state_dict``/``load_state_dict``: modules (plain, DDP,
    FSDP2), optimizers, schedulers, scalers, EMA copies, your own. ``loader`` is the one that
    :meth:`Run.steps` draws batches from. The process group is found where there is one; the
    script may run under ``everstep run``, ``torchrun`` or plain ``python``.

    Raises :class:`~everstep.errors.UsageError` for objects that cannot be saved, naming each.
    """
    options = options or Options()
    settings = effective(options, os.environ, sys.argv)
    place = read_place(os.environ, settings, pid=os.getpid(), ppid=os.getppid())
    loader = objects.pop(LOADER, None)
    voice = Voice(settings, place)
    feed = _feed(loader, options, voice)
    session = Session(objects, place, options, feed)
    connection = connect(settings, place, voice)
    return Run(session, connection, settings, place, feed, voice)


class Run:
    """One attempt of a training job, seen from one rank.

    ``step`` counts finished optimizer steps over all attempts. ``at_boundary`` is true while the
    body handles the last micro-batch of a step.
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
        self._boundary = Boundary(session, connection, settings, place)
        self._restorer = Restorer(session, connection, settings, place)
        self._open = True
        atexit.register(self.close)

    def restore(self) -> int:
        """Put the newest recovery point back, once per attempt; gives the step to go on from.

        :meth:`steps` calls it; call it yourself only in a loop of your own. Raises
        :class:`~everstep.errors.RestoreError` where a recovery point is expected and none can be
        loaded; the job is then stopped, never started from scratch (R5).
        """
        if not self._restored:
            with self._fatal_errors():
                self.step = self._restorer.restore()
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
        if until < 0 or accumulate < 1:
            raise UsageError("steps() needs until >= 0 and accumulate >= 1.")
        self.restore()
        if self.step >= until:
            self._boundary.report_finished_before(self.step, until)
        while self.step < until:
            for micro in range(accumulate):
                self.at_boundary = micro == accumulate - 1
                yield self._next()
            self.step_end()
        self._finish()

    def step_end(self) -> None:
        """Declare a step boundary: for a loop of your own, right after ``optimizer.step()``."""
        if not self._restored:
            raise UsageError("step_end() came before restore().", hint="Call run.restore() first.")
        self.step += 1
        self.at_boundary = False
        try:
            self._boundary.pass_step(self.step)
        except Preempted as stop:
            self._leave(stop.exit_code, str(stop))

    def checkpoint(self, *, wait: bool = False, timeout: float = 600.0) -> bool:
        """Cut the current step now and make it durable in the background.

        Call it on every rank at the same step, between two steps. ``wait`` waits up to
        ``timeout`` s for the commit; the answer is whether it is committed (always False without
        ``wait``). A failing save never raises (R3): the event names the cause.
        """
        if not self._restored:
            raise UsageError("checkpoint() came before restore().", hint="Call it inside the loop.")
        return self._boundary.checkpoint(self.step, wait=wait, timeout=timeout)

    def log(self, **values: Any) -> None:
        """Note figures of the step that is being computed (floats or 0-d tensors).

        They go to the journal of events where one was asked for; a tensor is read only then,
        because reading it makes a device wait.
        """
        self._voice.log_values(self.step + 1, values)

    def close(self) -> None:
        """Release the keeper, hooks and signal handlers. Called at exit; may be called twice."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            self._boundary.close()
            self._session.close()
            self._connection.close(finished=self._finished)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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

    def _leave(self, exit_code: int, why: str) -> None:
        print(f"everstep: {why}", file=sys.stderr, flush=True)
        self.close()
        raise SystemExit(exit_code)

    def _fatal_errors(self) -> _Fatal:
        return _Fatal(self._connection)


class _Fatal:
    """Tells the agent that a restart cannot help before the error leaves this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EverstepError) and not error.retryable:
            self._connection.fatal(error)


def _feed(loader: Any, options: Options, voice: Voice) -> DataFeed | None:
    if loader is None:
        return None
    return DataFeed(
        loader,
        name=LOADER,
        inexact=options.inexact_data,
        on_progress=voice.report_replay,
        on_warning=voice.warn,
    )
