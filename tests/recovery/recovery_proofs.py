"""What a disturbed run has to show: the undisturbed run's figures and state, bit by bit (R4), and
that no restore went further back than it had to (R5)."""

from __future__ import annotations

from collections.abc import Mapping

from recovery_runs import JOB, Trial, Undisturbed

from everstep.drill import kinds, losses, states
from everstep.drill.progress import kept_of


def assert_same(trial: Trial, undisturbed: Undisturbed) -> None:
    """R4: every loss of every step on every rank, the repeated ones too, and the final state."""
    found = losses.compare(undisturbed.figures, losses.figures(trial.events))
    case = trial.case
    assert found.identical, trial.told("\n".join(("losses differ", *found.differences)))
    assert found.steps == case.steps
    assert found.compared >= case.steps * case.world
    state = states.compare_states(undisturbed.final, states.final_of(trial.store, JOB))
    assert state.identical, trial.told("\n".join(("the states differ", *state.differences)))
    assert (state.step, state.ranks) == (case.steps, case.world)
    assert state.tensors > 0


def assert_nothing_lost(
    trial: Trial, *, memory_lost: bool = False, damaged: Mapping[int, int] | None = None
) -> None:
    """R5: each restore gives at least the newest committed step; where memory was not lost
    (``memory_lost``: all that held it may have died at once), at least the newest complete
    snapshot. ``damaged``: by attempt, the step whose checkpoint was damaged before it."""
    ordered = sorted(trial.events, key=lambda event: event.mono)
    for number, event in enumerate(ordered):
        if event.kind != kinds.ELECTED:
            continue
        kept = kept_of(ordered[:number])
        committed = kept.newest_commit(without=(damaged or {}).get(event.attempt))
        floor = committed if memory_lost else max(kept.snapshot, committed)
        source = kinds.fact_text(event, "source")
        assert (event.step or 0) >= floor, trial.told(
            f"attempt {event.attempt} went on from step {event.step} ({source}), "
            f"though step {floor} was kept"
        )
        assert source != "fresh" or not floor, trial.told("started from scratch silently")
