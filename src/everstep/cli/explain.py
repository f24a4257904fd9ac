"""``everstep explain``: one incident, from what was seen to how it ended."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from everstep.cli.past import Past, past_of, render_problems
from everstep.cli.places import job_option, store_option
from everstep.cli.report import json_option, reported, reporter
from everstep.errors import ObjectMissing, UsageError
from everstep.faults.history import IncidentRecord
from everstep.faults.tell import Explanation, explain, moment, newest

FORMAT = "everstep.explain/1"


class Explained(msgspec.Struct, frozen=True):
    """What ``everstep explain --json`` prints. ``problems`` are records of the job's history that
    cannot be read."""

    store: str
    job: str
    explanation: Explanation
    problems: tuple[str, ...]
    format: str = FORMAT


@click.command("explain")
@click.argument("incident", required=False)
@click.option("--last", is_flag=True, help="The newest incident (also where none is named).")
@job_option
@store_option
@json_option
@reported
def command(incident: str | None, last: bool, job: str | None, store: str, as_json: bool) -> int:
    """Explain an incident: the evidence, the verdict, the decision, and what came of it.

    INCIDENT is an id of `everstep incidents`, or the beginning of one. The first three lines say
    what failed, what was decided, and how it ended. Exit code 1 where there is no such incident, or
    a record of the job's history cannot be read.
    """
    if incident is not None and last:
        raise UsageError("--last and an incident are both given.", hint="Drop one of them.")
    past = past_of(store, job)
    found = explain(past.history, _chosen(past, incident), past.limits)
    assert found is not None, "the id is that of an incident in the history"
    result = Explained(past.url, past.job.name, found, past.problems)
    reporter(as_json=as_json).result(result, lambda console: _render(result, console))
    return 1 if past.problems else 0


def _chosen(past: Past, wanted: str | None) -> str:
    """The id of the incident that is meant. Raises ``ObjectMissing``, ``UsageError``."""
    records = (record for _, record in past.history.records)
    ids = list(dict.fromkeys(r.id for r in records if isinstance(r, IncidentRecord)))
    if wanted is None:
        last = newest(past.history)
        if last is None:
            raise ObjectMissing(f"job {past.job.name} has no incident in {past.url}.")
        return last
    meant = [wanted] if wanted in ids else [name for name in ids if name.startswith(wanted)]
    if not meant:
        known = ", ".join(ids[-8:]) or "none"
        raise ObjectMissing(
            f"job {past.job.name} has no incident {wanted}.", hint=f"The newest: {known}."
        )
    if len(meant) > 1:
        raise UsageError(f"{wanted} begins several incidents.", hint=f"One of: {', '.join(meant)}.")
    return meant[0]


def _render(result: Explained, console: Console) -> None:
    found = result.explanation
    for line in found.headline:
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"incident {found.incident} of {result.job}, {moment(found.at)}", markup=False,
        soft_wrap=True,
    )  # fmt: skip
    for section in found.sections:
        if section.lines:
            console.print(f"\n[bold]{section.title}[/]")
        for line in section.lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    render_problems(result.problems, console)
