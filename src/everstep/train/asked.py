"""What a decision asks of this attempt, on one rank: a first batch that waits, steps that are left
out.

Owns: waiting for a late verdict, and that a step whose batches are to be left out is left out, in a
loop of the user's own too. Never does: decide, draw a batch by itself. Called by:
:class:`everstep.train.run.Run`.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.errors import UsageError
from everstep.train.connect import Connection
from everstep.train.since import Since


class Asked:
    """One attempt's. Steps are counted from 1."""

    def __init__(self, connection: Connection, since: Since) -> None:
        self._connection = connection
        self._since = since
        self._loop_asks = False

    def await_verdict(self) -> None:
        """Wait where the verdict on the attempt before may still be coming."""
        if not self._connection.is_held():
            return
        say = self._connection.say
        say("train.holding", "the first batch waits for the verdict", level="debug")
        seconds = self._connection.await_release()
        say("train.held", f"it has waited {seconds:.2f} s", level="debug", seconds=seconds)

    def leaves_out(self, step: int) -> bool:
        """Whether the batches of ``step`` are to be left out."""
        return step in self._connection.skip

    def loop_asks(self, step: int) -> bool:
        """The same, asked by a loop of the user's own: it knows what to do."""
        self._loop_asks = True
        return self.leaves_out(step)

    def leave_out(self, step: int, batches: int, draw: Callable[[], object]) -> None:
        """Draw what the step would have used, and do nothing with it."""
        for _ in range(batches):
            draw()
        self._tell(step)

    def check_ended(self, step: int) -> None:
        """A loop of the user's own has ended ``step``. Raises :class:`UsageError` where it should
        have left it out and has not."""
        if not self.leaves_out(step):
            return
        if not self._loop_asks or self._since.stepped:
            did = "did a step of the optimizer" if self._loop_asks else "does not ask"
            raise UsageError(
                f"the batches of step {step} are to be left out, and this loop {did}.",
                hint="Before a step uses its batches ask run.skips(run.step + 1); where it says "
                "True, draw them, throw them away and call run.step_end().",
            )
        self._tell(step)

    def _tell(self, step: int) -> None:
        self._connection.say(
            "train.step_skipped",
            f"step {step}: its batches are left out, no optimizer steps", step=step,
            level="warning",
        )  # fmt: skip
