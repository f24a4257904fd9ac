"""``everstep node``: an operator's word about a node."""

from __future__ import annotations

import click

from everstep.cli.past import past_of, print_said, say
from everstep.cli.places import job_option, store_option
from everstep.cli.report import json_option, reported


@click.group("node")
def command() -> None:
    """Exclude a node from a job, or pardon one that is excluded or suspected.

    Both are recorded in the job's history, with who said it and when; said again they change
    nothing. A node that no record of the job names is taken with a warning.
    """


@command.command("exclude")
@click.argument("node")
@click.option("--reason", required=True, metavar="TEXT", help="Why; it is recorded.")
@job_option
@store_option
@json_option
@reported
def exclude(node: str, reason: str, job: str | None, store: str, as_json: bool) -> int:
    """Give NODE no work of the job any more, from its next attempt on, until it is pardoned.

    Exit code 0.
    """
    past = past_of(store, job)
    print_said(say(past, "exclude", node, reason, ""), as_json=as_json)
    return 0


@command.command("pardon")
@click.argument("node")
@click.option("--reason", default="", metavar="TEXT", help="Why; it is recorded.")
@job_option
@store_option
@json_option
@reported
def pardon(node: str, reason: str, job: str | None, store: str, as_json: bool) -> int:
    """Forget what is held against NODE; it is on probation for a while.

    Exit code 0.
    """
    past = past_of(store, job)
    print_said(say(past, "pardon", node, reason, ""), as_json=as_json)
    return 0
