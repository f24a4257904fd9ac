"""``everstep drill --matrix``: the table that the documentation shows.

Called by: drill of this room.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from rich.console import Console

from everstep.cli.report import Reporter, mark, table
from everstep.drill.examine import ScenarioReport
from everstep.drill.matrix import MatrixResult, run_matrix, worth_telling
from everstep.drill.scenarios import chosen
from everstep.drill.trial import Place


def run(talk: Reporter, folder: Path, only: str | None, seed: int | None, *, kept: bool) -> int:
    """Run the matrix and show it; the exit code."""
    wanted = chosen([kind for kind in (only or "").split(",") if kind])
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    talk.say(f"seed {seed}, folder {folder}")
    result = run_matrix(
        wanted,
        Place(folder, dict(os.environ)),
        seed=seed,
        tell=lambda event: talk.event(event) if worth_telling(event) else None,
        show=lambda report: talk.say(f"{report.kind}: {_state(report)}"),
    )
    if result.ok and not kept:
        shutil.rmtree(folder)
    talk.result(result, lambda console: render(result, console))
    return 0 if result.ok else 1


def render(result: MatrixResult, console: Console) -> None:
    """A line for each kind, then what was wrong, and what this machine does not allow."""
    rows = table(
        "fault", "class", "action", "root", "then", "detected in", "resumed in", "steps repeated",
        "tier", "identical", "",
        right=("detected in", "resumed in", "steps repeated"),
    )  # fmt: skip
    for report in result.reports:
        rows.add_row(*_row(report))
    console.print(rows)
    judged = [report for report in result.reports if not report.impossible]
    right = sum(report.ok for report in judged)
    minutes, seconds = divmod(round(result.seconds), 60)
    console.print(
        f"\n{right} of {len(judged)} judged right in {minutes} min {seconds} s; seed {result.seed}"
    )
    for report in result.reports:
        if report.impossible:
            console.print(
                f"{report.kind}: not possible on this machine, so not shown: {report.impossible}",
                markup=False,
            )
        for reason in report.why:
            console.print(f"  {report.kind}: {reason}", markup=False)
        if report.why:
            console.print(f"  {report.kind}: see {Path(report.journal).parent}", markup=False)
    console.print(f"[bold]{mark('ok' if result.ok else 'fail')}[/]")


def _row(report: ScenarioReport) -> tuple[str, ...]:
    if report.impossible:
        return (report.kind, *["-"] * 9, "not possible")
    identical = {None: "-", True: "yes", False: "NO"}[report.identical]
    return (
        report.kind, report.fault or "none", report.action or "none", report.root or "nobody",
        report.then, _seconds(report.detected_in), _seconds(report.resumed_in),
        "-" if report.steps_repeated is None else str(report.steps_repeated), report.tier or "-",
        identical, mark("ok" if report.ok else "fail"),
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def _state(report: ScenarioReport) -> str:
    if report.impossible:
        return "not possible here"
    return "ok" if report.ok else "; ".join(report.why)
