"""What a drill found, as records: the stable shape of ``everstep drill --json``.

Owns: the records and the verdict. Never does: I/O. Called by: the drill, cli.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.drill.judge import FaultReport
from everstep.drill.losses import LossReport
from everstep.drill.states import StateReport

FORMAT = "everstep.drill/1"

NO_VALUES = (
    "no logged value was compared, so nothing is proved of the losses: call run.log(loss=...) in "
    "the script, or name what it logs with --compare"
)

Verdict = Literal["recovered", "failed", "not reproducible"]

EXIT: dict[Verdict, int] = {"recovered": 0, "failed": 1, "not reproducible": 3}
"""Exit codes of ``everstep drill``; 2 is a bad argument."""


class RunReport(msgspec.Struct, frozen=True):
    """One run of the script. ``exit_code`` is that of the last ``everstep run``; ``seconds`` the
    wall time from the first start to the last end. ``store`` and ``journal`` are there afterwards
    only where the drill kept its folder."""

    job: str
    store: str
    exit_code: int
    seconds: float
    attempts: int
    last_step: int
    journal: str
    problems: tuple[str, ...] = ()


class Reference(msgspec.Struct, frozen=True):
    """The comparison with an undisturbed run. ``reproducible``: whether two undisturbed runs
    agree; None where that need not be asked, because the drilled run agrees with the first."""

    run: RunReport
    losses: LossReport
    state: StateReport
    reproducible: bool | None = None

    @property
    def identical(self) -> bool:
        return self.losses.identical and self.state.identical

    @property
    def nothing_compared(self) -> bool:
        """Whether there was no logged value to compare, so that equal losses prove nothing."""
        return self.losses.compared == 0


class DrillResult(msgspec.Struct, frozen=True):
    """The whole drill. ``verdict`` says what was shown; ``why`` is empty iff it is recovered."""

    verdict: Verdict
    why: tuple[str, ...]
    seed: int
    command: tuple[str, ...]
    faults: tuple[FaultReport, ...]
    run: RunReport
    reference: Reference | None = None
    format: str = FORMAT


def conclude(
    *,
    seed: int,
    command: tuple[str, ...],
    faults: tuple[FaultReport, ...],
    run: RunReport,
    reference: Reference | None,
) -> DrillResult:
    """Put the parts together and say what they show."""
    why = [f"{report.fault}: {reason}" for report in faults for reason in report.why]
    why += run.problems
    verdict: Verdict = "failed" if why else "recovered"
    if reference is not None:
        why += [f"undisturbed run: {problem}" for problem in reference.run.problems]
        if reference.nothing_compared and not why:
            why.append(NO_VALUES)
        verdict = "failed" if why else "recovered"
        if not reference.identical:
            unsound = not why and reference.reproducible is False
            verdict = "not reproducible" if unsound else "failed"
            if unsound:
                why.append("two undisturbed runs of this script differ, so nothing can be compared")
            why += reference.losses.differences + reference.state.differences
    return DrillResult(verdict, tuple(why), seed, command, faults, run, reference)
