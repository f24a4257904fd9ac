"""``everstep incidents``: what failed, and how each ended."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.text import Text

from everstep.cli.past import past_of, render_problems
from everstep.cli.places import job_option, store_option
from everstep.cli.report import json_option, reported, reporter, table
from everstep.faults.outcomes import Figures, outcomes
from everstep.faults.standing import figures_text
from everstep.faults.tell import Row, moment, rows

FORMAT = "everstep.incidents/1"


class Incidents(msgspec.Struct, frozen=True):
    """What ``everstep incidents --json`` prints: all incidents, oldest first, and the figures over
    them, also by class."""

    store: str
    job: str
    incidents: tuple[Row, ...]
    figures: Figures
    by_class: dict[str, Figures]
    problems: tuple[str, ...]
    format: str = FORMAT


@click.command("incidents")
@job_option
@store_option
@json_option
@reported
def command(job: str | None, store: str, as_json: bool) -> int:
    """List a job's incidents, oldest first: class, root, action and result.

    Exit code 1 where a record of the job's history cannot be read.
    """
    past = past_of(store, job)
    found = outcomes(past.history)
    result = Incidents(
        past.url, past.job.name, rows(past.history), found.figures, found.by_class, past.problems
    )
    reporter(as_json=as_json).result(result, lambda console: _render(result, console))
    return 1 if past.problems else 0


def _render(result: Incidents, console: Console) -> None:
    if result.incidents:
        shown = table("incident", "when", "class", "root", "step", "action", "result",
                      right=("step",))  # fmt: skip
        for item in result.incidents:
            shown.add_row(
                Text(item.incident), moment(item.at), Text(item.fault), Text(item.root),
                "" if item.step is None else str(item.step), item.action, item.result,
            )  # fmt: skip
        console.print(shown)
    console.print(f"{result.job}: {figures_text(result.figures)}", markup=False)
    render_problems(result.problems, console)
