"""``everstep drill``: injects faults into a real run and judges the recovery."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from everstep.cli import matrix
from everstep.cli.report import json_option, mark, reported, reporter, size, table
from everstep.core.events import Event, counted
from everstep.drill import plan, scenarios
from everstep.drill.drill import Options, drill
from everstep.drill.judge import FaultReport
from everstep.drill.result import EXIT, DrillResult, Reference
from everstep.errors import UsageError

_HEARD = ("drill", "agent", "keeper")


@click.command(
    "drill",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--fault",
    "single",
    multiple=True,
    metavar="KIND[:RANK][@STEP|@POINT[#N]]",
    help="One fault, at a step or at a named point. May be given several times.",
)
@click.option(
    "--faults",
    "several",
    metavar="KIND,...",
    help=f"Faults spread over the run, of {', '.join(plan.KINDS)}; or 'all'. "
    f"Default: {','.join(plan.DEFAULT)}.",
)
@click.option("--seed", type=int, help="Which rank, byte and bit; drawn and printed if not given.")
@click.option(
    "--reference",
    is_flag=True,
    help="Also run undisturbed, and compare losses step by step and the final state bit by bit.",
)
@click.option(
    "--compare",
    "names",
    multiple=True,
    metavar="NAME",
    help="A logged figure to compare (default: every one with 'loss' in its name).",
)
@click.option("--store", default="", help="A store to use (default: one of the drill's own).")
@click.option("--job", default="", help="Name of the job (default: a new one).")
@click.option(
    "--gap",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Steps between faults where the length of the run is unknown.",
)
@click.option(
    "--checkpoint-every",
    default="1s",
    show_default=True,
    help="Seconds between durable checkpoints, unless EVERSTEP_CHECKPOINT_EVERY is set.",
)
@click.option(
    "--patience",
    default=120.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds within which a fault must be overcome.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep journals, logs and stores there (default: only if the drill fails).",
)
@click.option(
    "--matrix",
    "all_kinds",
    is_flag=True,
    help="Every kind of fault, each in a run of its own with a script of the drill's, judged by "
    "the job's own history: class, action, root, steps lost, bit-identity.",
)
@click.option(
    "--only",
    metavar="KIND,...",
    help=f"With --matrix: only these, of {', '.join(scenarios.KINDS)}.",
)
@click.option("--nproc-per-node", "--nproc_per_node", metavar="N", help="As for `everstep run`.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[RUN FLAGS] SCRIPT [ARGS]...")
@reported
def command(
    single: tuple[str, ...],
    several: str | None,
    seed: int | None,
    reference: bool,
    names: tuple[str, ...],
    store: str,
    job: str,
    gap: int,
    checkpoint_every: str,
    patience: float,
    keep: Path | None,
    all_kinds: bool,
    only: str | None,
    nproc_per_node: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run SCRIPT under `everstep run`, inject faults, and judge each recovery.

    The drill's own options come first, then flags of `everstep run`, then the script. --matrix
    takes neither: it runs a small script of its own on 2 ranks.

    Exit code 0: every fault was overcome (and with --reference nothing differs; with --matrix all
    that this machine allows was judged right); 1: not so; 2: bad arguments; 3: two undisturbed runs
    differ, so the script cannot be compared.
    """
    talk = reporter(as_json=as_json)
    if only is not None and not all_kinds:
        raise UsageError("--only chooses of the kinds of --matrix.", hint="Say --matrix as well.")
    if all_kinds:
        if command or single or several:
            raise UsageError(
                "--matrix has its own script and faults.",
                hint="Say --only KIND,... to choose some.",
            )
        signal.signal(signal.SIGTERM, _leave)
        return matrix.run(talk, _folder(keep), only, seed, kept=keep is not None)
    flags = () if nproc_per_node is None else ("--nproc-per-node", nproc_per_node)
    folder = _folder(keep)
    options = Options(
        command=(*flags, *command) if command else (),
        faults=chosen_faults(single, several),
        folder=folder,
        environment=dict(os.environ),
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        reference=reference,
        store=store,
        job=job,
        gap=gap,
        names=names,
        patience=patience,
        checkpoint_every=checkpoint_every,
    )
    talk.say(f"seed {options.seed}, folder {folder}")
    signal.signal(signal.SIGTERM, _leave)
    result = drill(options, lambda event: talk.event(event) if _worth_telling(event) else None)
    if keep is None and result.verdict == "recovered":
        shutil.rmtree(folder)
    talk.result(result, lambda console: render(result, console))
    return EXIT[result.verdict]


def _leave(number: int, frame: object) -> None:
    """SIGTERM becomes an exception, so that the run's processes are ended on the way out."""
    del frame
    raise SystemExit(128 + number)


def chosen_faults(single: Sequence[str], several: str | None) -> tuple[plan.Fault, ...]:
    """The faults that the options name; the default set where they name none."""
    named = [plan.parse_fault(text) for text in single]
    if several == "all":
        named += [plan.Fault(kind) for kind in plan.KINDS]
    elif several:
        named += [plan.parse_fault(text) for text in several.split(",")]
    return tuple(named) or tuple(plan.Fault(kind) for kind in plan.DEFAULT)


def _folder(keep: Path | None) -> Path:
    """A folder that does not exist yet; the drill makes it."""
    name = f"everstep-drill-{uuid.uuid4().hex[:8]}"
    return (keep or Path(tempfile.gettempdir())).absolute() / name


def _worth_telling(event: Event) -> bool:
    return event.source in _HEARD and event.level != "debug"


def render(result: DrillResult, console: Console) -> None:
    """The table of faults, the comparison, the verdict."""
    rows = table("fault", "at step", "detected in", "resumed in", "tier", "steps repeated", "",
                 right=("at step", "detected in", "resumed in", "steps repeated"))  # fmt: skip
    for report in result.faults:
        rows.add_row(
            report.fault, _number(report.step), _seconds(report.detected_in),
            _seconds(report.resumed_in), _tier(report), _number(report.steps_repeated),
            mark("ok" if report.ok else "fail"),
        )  # fmt: skip
    console.print(rows)
    run = result.run
    console.print(
        f"\n{counted(run.attempts, 'attempt')} to step {run.last_step} in {run.seconds:.1f} s, "
        f"exit code {run.exit_code}; seed {result.seed}"
    )
    if result.reference is not None:
        _render_reference(result.reference, console)
    for reason in result.why:
        console.print(f"  {reason}", markup=False)
    good = result.verdict == "recovered"
    console.print(f"[bold]{mark('ok' if good else 'fail')} {result.verdict}[/]")
    if not good:
        console.print(f"journals, logs and stores: {Path(run.journal).parents[1]}", markup=False)


def _render_reference(reference: Reference, console: Console) -> None:
    losses, state = reference.losses, reference.state
    same = "identical to" if losses.identical else "DIFFERENT from"
    if reference.nothing_compared:
        console.print("logged: nothing was compared")
    else:
        console.print(
            f"logged: {', '.join(losses.names)}: {losses.compared} values at {losses.steps} steps, "
            f"{losses.repeated} logged more than once, {same} the undisturbed run's"
        )
    same = "identical to" if state.identical else "DIFFERENT from"
    if state.tensors == 0 and not state.identical:
        console.print("final state: nothing was compared")
        return
    console.print(
        f"final state of step {state.step}: {counted(state.tensors, 'tensor')}, "
        f"{size(state.bytes)}, objects of {counted(state.ranks, 'rank')}, {same} the undisturbed "
        "run's, bit by bit"
    )
    if state.idle:
        console.print(
            f"neither seeded nor used by the script, and carried unchanged through the run: "
            f"{', '.join(state.idle)}",
            markup=False,
        )


def _tier(report: FaultReport) -> str:
    if report.tier is None:
        return "none needed" if report.resumed_in is not None else "-"
    return report.tier


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
