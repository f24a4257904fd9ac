"""Every kind of fault, each in a run of its own, against one undisturbed run.

Owns: the order of runs and what is compared. Called by: cli, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from everstep.core.events import Event
from everstep.drill import losses, namespaces, states
from everstep.drill.examine import ScenarioReport, Told, examine, impossible, incidents
from everstep.drill.scenarios import Drawn, Scenario, draw
from everstep.drill.trial import Done, Place, Tell, Trial
from everstep.errors import DrillError, EverstepError
from everstep.faults.history import Record, unpack
from everstep.store import open_store

FORMAT = "everstep.drill.matrix/1"


class MatrixResult(msgspec.Struct, frozen=True):
    """The whole matrix. ``ok``: every kind that this machine allows was judged right. ``seconds``
    are those of all runs but the undisturbed one."""

    ok: bool
    seed: int
    seconds: float
    reports: tuple[ScenarioReport, ...]
    format: str = FORMAT


@dataclass(frozen=True)
class Undisturbed:
    """What a run comes to that nothing disturbs."""

    figures: losses.Figures
    final: states.Final


def run_matrix(
    scenarios: Sequence[Scenario],
    place: Place,
    *,
    seed: int,
    tell: Tell,
    show: Callable[[ScenarioReport], None] = lambda _: None,
) -> MatrixResult:
    """Run each scenario and judge it; ``show`` gets each report when it is there.

    Raises :class:`DrillError` where the undisturbed run fails. No process of a run is left.
    """
    reference = undisturbed(place, tell)
    reports = []
    for scenario in scenarios:
        report = run_one(scenario, place, reference, seed=seed, tell=tell)
        show(report)
        reports.append(report)
    return conclude(seed, reports)


def conclude(seed: int, reports: Sequence[ScenarioReport]) -> MatrixResult:
    """What the reports come to."""
    good = all(report.ok for report in reports if not report.impossible)
    seconds = sum(report.seconds for report in reports)
    return MatrixResult(good, seed, round(seconds, 1), tuple(reports))


def undisturbed(place: Place, tell: Tell) -> Undisturbed:
    """The run that all others are compared with."""
    done = Trial(place, None, Drawn(0, 0), "undisturbed", tell).run()
    if done.codes != (0,) or done.problems:
        raise DrillError(
            f"the undisturbed run ended with {done.codes[0]}; see {done.journal.parent}.",
            *done.problems[:1],
        )
    return Undisturbed(losses.figures(done.events), states.final_of(done.store, done.job))


def run_one(
    scenario: Scenario, place: Place, reference: Undisturbed, *, seed: int, tell: Tell
) -> ScenarioReport:
    """One scenario's run and its report."""
    drawn = draw(scenario, seed, place.between)
    if reason := namespaces.missing(scenario.needs):
        return impossible(scenario, drawn, reason)
    trial = Trial(place, scenario, drawn, scenario.kind, tell)
    try:
        done = trial.run()
    except DrillError as error:
        done = trial.given_up(error.what)
    try:
        records = _records(done)
        told = Told(
            done.events, records, done.codes, done.struck,
            _differences(scenario, done, records, reference), done.problems,
        )  # fmt: skip
    except EverstepError as error:
        why = f"what the run has left cannot be read: {error}"
        told = Told(done.events, (), done.codes, done.struck, None, (*done.problems, why))
    return examine(scenario, drawn, told, seconds=done.seconds, journal=str(done.journal))


def worth_telling(event: Event) -> bool:
    """Whether a person who waits for the matrix wants to see it."""
    return event.source in ("drill", "agent") and event.level != "debug"


def _records(done: Done) -> tuple[Record, ...]:
    return unpack(open_store(done.store).job(done.job).history().entries).records


def _differences(
    scenario: Scenario, done: Done, records: Iterable[Record], reference: Undisturbed
) -> tuple[str, ...] | None:
    """None where the run was not to reach its end. What was logged of the step that failed, before
    it did, is the fault itself (a loss that is NaN)."""
    if scenario.expect.then == "stops" or set(done.codes) != {0}:
        return None
    failed = {(one.attempt, one.where) for one in incidents(records)}
    kept = [event for event in done.events if (event.attempt, event.step) not in failed]
    logged = losses.compare(reference.figures, losses.figures(kept))
    state = states.compare_states(reference.final, states.final_of(done.store, done.job))
    return logged.differences + state.differences
