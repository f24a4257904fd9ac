"""``everstep bench``: hands its arguments, untouched, to the benchmarks.

Called by: the group in :mod:`everstep.cli`. ``python -m everstep.bench`` takes the same ones, so
argparse reads them there and click does not.
"""

from __future__ import annotations

import sys

import click


@click.command(
    "bench",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Measure everstep beside its peers: `recover`, `save`, `memory` or `classify`.

    Each takes `--help`, `--json`, `--strict` and `--folder`.
    """
    from everstep.bench.main import main

    sys.exit(main(arguments))
