"""The process that ``everstep bench classify`` measures: reads one log, prints what it took.

Called by: :mod:`everstep.bench.classify` as ``python -m``.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import msgspec

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.read import read


class Took(msgspec.Struct, frozen=True):
    """Seconds of CPU for reading and judging (without loading the catalogue), the peak of resident
    memory in bytes, and the verdict."""

    seconds: float
    resident: int
    fault: str
    ranks: tuple[int, ...]


def main() -> None:
    """Judge the log that the first argument names."""
    catalog = load()
    before = time.process_time()
    (item,) = read(Path(sys.argv[1]), catalog)
    verdict = judge(item.incident, catalog)
    took = time.process_time() - before
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(msgspec.json.encode(Took(took, resident, verdict.fault, verdict.root_ranks)).decode())


if __name__ == "__main__":
    main()
