"""``everstep run``: hands its arguments, untouched, to the agent.

Called by: the group in :mod:`everstep.cli`. The flags are torchrun's own and everstep's, so
argparse reads them (see :mod:`everstep.agent.flags`) and click does not.
"""

from __future__ import annotations

import os
import sys

import click


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run a training script and keep it alive (takes torchrun's flags)."""
    from everstep.agent.main import run

    code = run(arguments)
    # Not sys.exit: torch's rendezvous leaves a thread in C++, and an interpreter that is taken
    # down under it aborts ("terminate called without an active exception"), whatever the code was.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
