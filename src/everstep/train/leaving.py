"""The end of a run that has not reached its last step: what can be saved then is saved, and what
cannot is told.

Owns: how a loop was left, what state that leaves behind, and the words for it. Never does: raise;
act on the way of an exception that ends the process; cut by itself (boundary does). Called by:
:class:`everstep.train.run.Run`.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

from everstep.core.events import counted
from everstep.core.settings import Settings
from everstep.errors import EverstepError
from everstep.train.boundary import Boundary, Preempted
from everstep.train.place import Place
from everstep.train.since import Beside, Since
from everstep.train.voice import Voice

_LETS_GO = frozenset(
    {"POP_TOP", "POP_ITER", "END_FOR", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "DELETE_FAST"}
)
"""Instructions that let go of a loop's iterator without an exception: ``break`` and ``return`` in
a ``for``, and another value for the variable that holds it. None of them can raise."""

_AT_EXIT_SECONDS = 30.0
"""At the interpreter's exit one rank may end alone, with a failure that only its exit code tells:
the others' cuts are not waited for longer than this."""


def left_in_order(frame: FrameType | None) -> bool:
    """Whether ``frame``, which has let go of the iterator, does so by ``break`` or ``return``.

    An exception that unwinds the frame lets go of it as well, and cannot be seen from the iterator:
    the interpreter puts it aside meanwhile. But it leaves the frame at an instruction that raises.
    """
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and dis.opname[code[at]] == "CACHE":
        at -= 2
    return at >= 0 and dis.opname[code[at]] in _LETS_GO


class Leaving:
    """The early end of one rank. ``until`` is what the loop was to reach, None in a loop of the
    user's own."""

    def __init__(
        self, since: Since, boundary: Boundary, voice: Voice, settings: Settings, place: Place
    ) -> None:
        self._since = since
        self._boundary = boundary
        self._voice = voice
        self._settings = settings
        self._place = place
        self._saved = -1
        self.until: int | None = None

    def count_step(self, step: int) -> bool:
        """The loop was left where ``step`` is whole: pass its boundary and make it durable."""
        try:
            self._boundary.pass_step(step)
        except Preempted as stop:
            self._since.boundary()
            self._voice.say("train.left", str(stop), step=step, loud=True)
            self._saved = step
            return False
        except EverstepError as wrong:
            self._voice.warn(f"{self._at(step)}, and this step is not saved: {wrong}")
            self._saved = step  # it was told
            return False
        self._since.boundary()
        return self._save(step, None, self._settings.final_deadline)

    def save_boundary(self, step: int) -> None:
        """The loop was left in the body after ``step``, where nothing may have been done yet."""
        beside = self._since.untouched(in_body=True)
        if beside is not None and not self._is_safe(step):
            self._save(step, beside, self._settings.final_deadline)

    def close(self, step: int, *, restored: bool, in_body: bool, exiting: bool) -> None:
        """The run ends in order; ``exiting``: because the interpreter does."""
        since = self._since
        if not restored or not (since.boundaries or in_body):
            self._warn_of_no_boundary(restored)
        elif in_body and since.stepped:
            self._warn_of_half_a_step(step)
        elif since.boundaries and not self._is_safe(step):
            self._save_late(step, in_body=in_body, exiting=exiting)

    # -- what is saved

    def _save_late(self, step: int, *, in_body: bool, exiting: bool) -> None:
        seconds = self._settings.final_deadline
        if exiting and self._place.world > 1:
            seconds = min(seconds, _AT_EXIT_SECONDS)
        beside = self._since.untouched(in_body=in_body)
        if beside is not None or self._boundary.holds(step):
            self._save(step, beside, seconds, cut=beside is not None)
        elif in_body:
            self._warn_of_half_a_step(step)
        else:
            self._voice.warn(
                f"{self._at(step)}; {self._newest(step)}. That step cannot be saved now, because "
                "it is not known to be as it was at its end. Call run.checkpoint(wait=True) right "
                "after the last run.step_end()."
            )

    def _save(self, step: int, beside: Beside | None, seconds: float, *, cut: bool = True) -> bool:
        """Whether ``step`` is committed; what happened is said."""
        why = self._boundary.keep(
            step, beside, seconds, lambda: self._tell_wait(step, seconds), cut=cut
        )
        self._saved = step
        if why is None:
            self._tell_saved(step)
            return True
        self._voice.warn(
            f"{self._at(step)}, and its checkpoint is not committed after {seconds:g} s: {why}. "
            f"All ranks must leave at the same step. {self._newest(step).capitalize()}."
        )
        return False

    def _is_safe(self, step: int) -> bool:
        return self._saved == step or self._boundary.is_durable(step)

    # -- what is told

    def _tell_saved(self, step: int) -> None:
        if step == self.until:
            return  # that is the end of the job, which has its own words
        self._voice.say(
            "train.stopped_early", f"{self._at(step)}: its checkpoint is committed", step=step,
            loud=True, until=self.until,
        )  # fmt: skip

    def _tell_wait(self, step: int, seconds: float) -> None:
        self._voice.warn(
            f"rank {self._place.rank}: {self._at(step)} and waits up to {seconds:g} s for its "
            "checkpoint, which needs all ranks to leave at the same step"
        )

    def _warn_of_half_a_step(self, step: int) -> None:
        self._voice.warn(
            f"{self._at(step)}, within step {step + 1}; {self._newest(step)}, and what was "
            "computed after it is not saved. Leave the `for` over run.steps itself by `break` at "
            "the end of the body; or where the step is whole, call run.step_end() and "
            "run.checkpoint(wait=True) after the loop."
        )

    def _warn_of_no_boundary(self, restored: bool) -> None:
        steps = self._since.steps
        if restored and not steps:
            return  # a loop that had nothing left to do
        did = f" and its optimizers have stepped {counted(steps, 'time')}" if steps else ""
        self._voice.warn(
            f"the script has called everstep.attach{did}, but it never ended a step, so "
            "nothing was saved. Loop over run.steps(until=...), or in a loop of your own call "
            "run.restore() before it and run.step_end() after each step."
        )

    def _at(self, step: int) -> str:
        return f"left at step {step}" + (f" of {self.until}" if self.until is not None else "")

    def _newest(self, step: int) -> str:
        found = _newest_committed(self._settings, step)
        if found is None:
            return "there is no checkpoint yet"
        return f"the newest checkpoint is of step {found}"


def ends_by_exception(before: object) -> bool:
    """Whether an exception is being handled or has ended the script, where ``sys.last_value`` was
    ``before`` at first. ``sys.exit(0)`` is none."""
    handled = sys.exc_info()[1]
    if isinstance(handled, SystemExit) and handled.code in (None, 0):
        handled = None
    return handled is not None or getattr(sys, "last_value", None) is not before


def _newest_committed(settings: Settings, step: int) -> int | None:
    """The newest committed step up to ``step``, None where none is there or can be seen."""
    # Not at the top: a restart from memory must not pay for importing the store's reader.
    from everstep.store import open_store

    try:
        known = open_store(settings.store).job(settings.job).checkpoints()
    except (EverstepError, OSError):
        return None
    return max((c.point.step for c in known if c.sound and c.point.step <= step), default=None)
