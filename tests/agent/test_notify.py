"""Who is told of a stop: a URL over real HTTP, or a real command."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from forked import Start, alive, wait_for

from everstep.agent import notify
from everstep.agent.record import Recorder
from everstep.core import exits
from everstep.faults.history import DecisionRecord, Rung, Stamp

FORKED = ("--run-path", "--start-method", "fork")
FAILS = "import everstep\neverstep.Options\nraise ValueError('the shapes differ')"


HANGS = "sh -c 'sleep 1000 & echo $$ $! > pids; wait'"


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, object]]]]:
    heard: list[dict[str, object]] = []

    class Hear(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            del words

    with HTTPServer(("127.0.0.1", 0), Hear) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", heard
        server.shutdown()
        thread.join()


def test_a_stop_is_posted(start: Start, receiver: tuple[str, list[dict[str, object]]]) -> None:
    url, heard = receiver
    agent = start("--max-restarts=0", "--notify", url, script=FAILS)
    assert agent.wait() == exits.FAILED
    wait_for(lambda: heard)
    assert heard[-1]["format"] == "everstep.notice/1"
    assert (heard[-1]["stopped"], heard[-1]["exit_code"]) == (True, exits.FAILED)
    assert "--max-restarts 0 is used up" in str(heard[-1]["reason"])
    assert agent.events("notice.sent")


def test_a_stop_is_told_to_a_command(start: Start, tmp_path: Path) -> None:
    agent = start("--max-restarts=0", "--notify", "tee told.json", script=FAILS)
    assert agent.wait() == exits.FAILED
    assert json.loads((tmp_path / "told.json").read_bytes())["action"] == "stop"


def test_a_command_that_hangs_ends_with_the_agent(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it has started."""
    monkeypatch.setattr(notify, "CLOSE_SECONDS", 3.0)  # the agent is forked from here
    agent = start("--max-restarts=0", "--notify", HANGS, script=FAILS)
    assert agent.wait() == exits.FAILED
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert "nobody could be told" in agent.said()


def test_a_command_that_hangs_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.2)
    said = io.StringIO()
    monkeypatch.chdir(tmp_path)
    notifier = notify.Notifier(HANGS, "job", "store", Recorder("job", stream=said))
    decision = DecisionRecord("d", 1, Stamp("agent", 0.0, 0.0, "boot"), Rung("stop"), "why")
    notifier.tell(decision, None)
    wait_for(lambda: "has not ended within 0.2 s" in said.getvalue())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids))
    notifier.close()


ANOTHER_EACH_TIME = """
import os
number = int(os.environ["EVERSTEP_ATTEMPT"])
if number < 5:
    raise [KeyError, ValueError, TypeError, IndexError][number - 1]("no")
"""


def test_four_fifths_of_a_budget_are_told_before_it_is_spent(
    start: Start, receiver: tuple[str, list[dict[str, object]]]
) -> None:
    url, heard = receiver
    flags = ("--window-restarts=5", "--no-progress=0", "--per-fingerprint=0")
    agent = start(*FORKED, *flags, "--notify", url, script=ANOTHER_EACH_TIME)
    assert agent.wait() == exits.FINISHED, agent.said()
    wait_for(lambda: heard)
    (told,) = heard
    assert (told["stopped"], told["action"], told["attempt"]) == (False, "restart_in_place", 4)
    assert told["alerts"] == ["80 % of the window budget are spent"]
    assert told["budget"] == {"window": 1}
    assert "warning: 80 % of the window budget are spent" in agent.said()


def test_a_receiver_that_fails_is_named_and_changes_nothing(start: Start) -> None:
    agent = start("--max-restarts=0", "--notify", "false", script=FAILS)
    assert agent.wait() == exits.FAILED
    assert "nobody could be told" in agent.said()
