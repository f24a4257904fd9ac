"""One merged log is one incident."""

from __future__ import annotations

import pytest
from plain_logs import LOGS

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.read import log


@pytest.mark.parametrize(("name", "text", "fault", "ranks", "node"), LOGS, ids=[x[0] for x in LOGS])
def test_merged_log(
    name: str, text: str, fault: str, ranks: tuple[int, ...], node: str | None
) -> None:
    verdict = judge(log(name, text.encode()), load())
    assert (verdict.fault, verdict.root_ranks, verdict.root_node) == (fault, ranks, node)
