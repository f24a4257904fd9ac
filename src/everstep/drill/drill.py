"""A whole drill: the disturbed run, the undisturbed one beside it, the comparison, the verdict.

Owns: the order of things and the folder they happen in. Called by: cli.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.script import check_script
from everstep.core.events import Event
from everstep.core.settings import from_environment, variable
from everstep.drill import losses, states
from everstep.drill.job import Job, Setup
from everstep.drill.judge import judge
from everstep.drill.plan import OF_STORE, Fault, Planned, check_rank, schedule
from everstep.drill.result import DrillResult, Reference, RunReport, conclude
from everstep.drill.run import Drive, Tell
from everstep.drill.storefault import faulty_url
from everstep.errors import EverstepError, ObjectMissing, UsageError
from everstep.store import open_store


@dataclass(frozen=True)
class Options:
    """``command``: what follows ``everstep run``. ``folder`` is made; journals, logs and (where
    ``store`` is empty) the stores go there. ``gap``: steps between faults where the length of the
    run is not known (without ``reference``). ``names``: logged names to compare, empty for all
    with "loss" in them. ``patience``: seconds a fault may take to be overcome."""

    command: tuple[str, ...]
    faults: tuple[Fault, ...]
    folder: Path
    environment: Mapping[str, str]
    seed: int = 0
    reference: bool = False
    store: str = ""
    job: str = ""
    gap: int = 10
    names: tuple[str, ...] = ()
    patience: float = 120.0
    checkpoint_every: str = "1s"


@dataclass(frozen=True)
class _Done:
    """A run that is over."""

    report: RunReport
    events: tuple[Event, ...]


def drill(options: Options, tell: Tell) -> DrillResult:
    """Run the script with faults (and without) and judge. ``tell`` hears every event.

    Raises :class:`UsageError` for a store or job that cannot be used, :class:`DrillError` where
    the drill itself fails. No process of the runs is left, whatever happens.
    """
    _check(options)
    _make(options.folder)
    undisturbed = _run(options, (), "undisturbed", tell) if options.reference else None
    total = undisturbed.report.last_step if undisturbed else None
    planned = schedule(options.faults, total=total, gap=options.gap)
    drilled = _run(options, planned, "drilled", tell)
    reference = _compare(options, undisturbed, drilled, tell) if undisturbed else None
    return conclude(
        seed=options.seed,
        command=options.command,
        faults=judge(drilled.events, planned),
        run=drilled.report,
        reference=reference,
    )


def _check(options: Options) -> None:
    if not options.command:
        raise UsageError("no script was given.", hint="everstep drill [OPTIONS] SCRIPT [ARGS]...")
    _check_command(options)
    if any(fault.kind in OF_STORE for fault in options.faults) and "://" in options.store:
        raise UsageError(
            f"faults of the store need a store on a local path, not {options.store}.",
            hint="Leave --store out: the drill makes a store of its own.",
        )
    if options.store and options.job and _job_exists(options):
        raise UsageError(
            f"job {options.job} exists in {options.store}: a drill must not hurt it.",
            hint="Leave --job out, or say a new name.",
        )


def _check_command(options: Options) -> None:
    """What `everstep run` would refuse, or a fault could never hit, before anything is run."""
    from everstep.agent.flags import survey  # loads torch: not for `everstep drill --help`

    from_environment(options.environment)
    seen = survey(options.command)
    check_script(seen.name, seen.kind, options.environment)
    if seen.world is not None:
        for fault in options.faults:
            check_rank(fault, range(seen.world))


def _job_exists(options: Options) -> bool:
    try:
        return options.job in open_store(options.store).jobs()
    except ObjectMissing:
        return False


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error}.") from error


def _run(options: Options, planned: Sequence[Planned], name: str, tell: Tell) -> _Done:
    folder = options.folder / name
    folder.mkdir()
    store = options.store if options.store and name == "drilled" else str(folder / "store")
    job = options.job or f"drill-{uuid.uuid4().hex[:8]}"
    if any(plan.fault.kind in OF_STORE for plan in planned):
        store = faulty_url(store, folder)
    environment = {**_budgets(options), **options.environment}
    setup = Setup(options.command, store, job, folder, environment, options.checkpoint_every)
    drive = Drive(
        Job(setup, planned), planned, seed=options.seed, patience=options.patience, tell=tell
    )
    report = drive.run()
    return _Done(report, tuple(drive.events))


def _budgets(options: Options) -> dict[str, str]:
    """A drill strikes more often within minutes than machines do in weeks: the same failure may
    come as often as it is injected. What stops a job that gets no further holds as always."""
    least = from_environment({})
    wanted = {name: getattr(least, name) for name in ("per_fingerprint", "window_restarts")}
    return {variable(name): str(default + len(options.faults)) for name, default in wanted.items()}


def _compare(options: Options, undisturbed: _Done, drilled: _Done, tell: Tell) -> Reference:
    """Compare; where they differ, ask by a second undisturbed run whose fault that is (R4)."""
    found = _difference(options, undisturbed, drilled)
    if found.nothing_compared or found.identical:
        return found
    if undisturbed.report.problems or drilled.report.problems:
        return found
    again = _run(options, (), "undisturbed-again", tell)
    reproducible = _difference(options, undisturbed, again).identical
    return Reference(found.run, found.losses, found.state, reproducible)


def _difference(options: Options, undisturbed: _Done, other: _Done) -> Reference:
    left = losses.figures(undisturbed.events, options.names)
    right = losses.figures(other.events, options.names)
    state = _compare_states(undisturbed.report, other.report)
    return Reference(undisturbed.report, losses.compare(left, right), state)


def _compare_states(undisturbed: RunReport, other: RunReport) -> states.StateReport:
    try:
        return states.compare_states(
            states.final_of(undisturbed.store, undisturbed.job),
            states.final_of(other.store, other.job),
        )
    except EverstepError as error:
        return states.StateReport(0, 0, 0, 0, (f"the states cannot be compared: {error}",))
