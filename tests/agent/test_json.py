"""``everstep run --json``: events for programs on standard output, and nothing else there."""

from __future__ import annotations

import io
import json

from forked import Start

from everstep.agent.record import Recorder
from everstep.core import exits
from everstep.core.events import decode_line

FORKED = ("--run-path", "--start-method", "fork")
SCRIPT = """
import os, sys
print("printed by the worker")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""


def test_events_are_alone_on_standard_output(start: Start) -> None:
    agent = start(*FORKED, "--json", script=SCRIPT)
    assert agent.wait() == exits.FINISHED, agent.said()
    events = [decode_line(line) for line in agent.out.read_bytes().splitlines()]
    kinds = [event.kind for event in events]
    assert kinds[0] == "job.started"
    assert kinds.count("attempt.started") == 2
    assert [e.facts["code"] for e in events if e.kind == "worker.exited"] == [3, 0]
    assert events[-1].facts["exit_code"] == 0
    assert agent.said().count("printed by the worker") == 2
    assert json.loads(agent.out.read_bytes().splitlines()[0])["job"]


def test_job_goes_on_where_nobody_reads_its_events() -> None:
    class Closed(io.BytesIO):
        def write(self, _: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    said = io.StringIO()
    record = Recorder("job", stream=said, lines=Closed())
    record.say("one", "one")
    record.say("two", "two")
    assert said.getvalue().count("nobody reads standard output") == 1
    assert "two" in said.getvalue()
