"""``everstep retry``: a job that was stopped for good may start again."""

from __future__ import annotations

import click

from everstep.cli.past import past_of, print_said, say
from everstep.cli.places import job_option, store_option
from everstep.cli.report import json_option, reported


@click.command("retry")
@click.option(
    "--reset-budget", "reason", required=True, metavar="REASON",
    help="Forget what was spent; REASON says what was changed, and is recorded.",
)  # fmt: skip
@job_option
@store_option
@json_option
@reported
def command(reason: str, job: str | None, store: str, as_json: bool) -> int:
    """Reset the budgets of a job that was stopped for good, and say how to start it.

    It starts nothing. Who, when and why is recorded in the job's history; said again before
    anything else happens it changes nothing. Exit code 0.
    """
    past = past_of(store, job)
    running = past.present.owner
    following = "" if running else past.present.start
    print_said(say(past, "reset-budget", "", reason, following), as_json=as_json)
    return 0
