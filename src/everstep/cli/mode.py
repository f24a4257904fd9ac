"""``everstep mode``: what a job does about failures, said while it runs."""

from __future__ import annotations

import click

from everstep.cli.past import past_of, print_said, say
from everstep.cli.places import job_option, store_option
from everstep.cli.report import json_option, reported
from everstep.faults.history import MODES


@click.command("mode")
@click.argument("mode", type=click.Choice(list(MODES)))
@click.option("--reason", default="", metavar="TEXT", help="Why; it is recorded.")
@job_option
@store_option
@json_option
@reported
def command(mode: str, reason: str, job: str | None, store: str, as_json: bool) -> int:
    """Say what the job does about failures from now on, until something else is said.

    `act` follows the verdicts; `advise` restarts in place and says what it would have done; `off`
    restarts in place. Budgets hold in all of them. Exit code 0.
    """
    past = past_of(store, job)
    print_said(say(past, "on-fault", mode, reason, ""), as_json=as_json)
    return 0
