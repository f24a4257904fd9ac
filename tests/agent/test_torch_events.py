"""``--event-log-handler``: torchrun's worker events reach torchrun's handlers."""

from __future__ import annotations

import json
import logging

import pytest

from everstep.agent import torch_events
from everstep.agent.decide import WorkerEnd
from everstep.agent.workers import Place

PLACE = Place(
    node=1, nodes=2, ranks=(2, 3), role_ranks=(2, 3), world_size=4, role_world_size=4,
    master_addr="h", master_port=1, restarts=5, max_restarts=9, run_id="r", use_agent_store=True,
)  # fmt: skip


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


@pytest.fixture
def heard() -> object:
    logger = logging.getLogger("torchelastic-events-console")
    handler = Heard()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_starts_and_ends_are_recorded_by_rank(heard: Heard) -> None:
    pids = {2: 20, 3: 30}
    ends = [WorkerEnd(3, 1), WorkerEnd(2, -9, by_everstep=True)]
    torch_events.workers_started("console", PLACE, "trainer", pids)
    torch_events.workers_ended("console", PLACE, "trainer", pids, ends)
    about = [event["metadata"] for event in heard.events]
    assert [(m["global_rank"], m["state"], m["agent_restarts"]) for m in about] == [
        (2, "START", 5), (3, "START", 5), (3, "FAILED", 5), (2, "TERMINATED", 5),
    ]  # fmt: skip
    assert json.loads(about[2]["metadata"])["exit_code"] == 1


def test_the_default_handler_costs_nothing(heard: Heard) -> None:
    torch_events.workers_started("null", PLACE, "trainer", {2: 20})
    assert heard.events == []
