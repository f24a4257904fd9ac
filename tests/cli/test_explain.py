"""``explain``, ``incidents`` and ``status`` on a store with a past."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from pasts import finished, job_of, recovered, stopped
from told import TIMEOUT

from everstep.cli.ls import list_job
from everstep.faults.limits import Limits
from everstep.faults.situation import Policy
from everstep.keeper.identity import identity_of
from everstep.store import OwnerIdentity, open_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    job_of(tmp_path / "store", stopped())
    return tmp_path / "store"


def test_explain_tells_it_all_in_three_lines_and_then_at_length(cli: Any, tmp_path: Path) -> None:
    job_of(tmp_path / "store", recovered())
    result = cli("explain", "--store", tmp_path / "store")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("XID_79 on rank 2 on node b at step 1204 (")
    assert lines[1].startswith("decided: restart on other nodes as attempt 2, because ")
    assert lines[2].startswith("recovered: step 1204 was done 10.9 s after the failure")
    assert lines[3] == "incident i1 of toy, 2026-01-05 10:30:12 UTC"
    titles = [line for line in lines[4:] if line and line[0] != " "]
    assert titles == [
        "seen", "verdict", "discarded", "decided", "otherwise", "done", "ended", "budget",
    ]  # fmt: skip


def test_the_readme_shows_what_the_command_prints(cli: Any, tmp_path: Path) -> None:
    job_of(tmp_path / "store", recovered())
    printed = cli("explain", "--store", tmp_path / "store").stdout
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- explain:begin.*?```text\n(.*?)```\n<!-- explain:end", text, re.S)
    assert shown is not None
    assert shown[1] == printed


def test_explain_as_json_says_the_same(cli: Any, cli_json: Any, store: Path) -> None:
    code, found = cli_json("explain", "i1", "--store", store)
    assert (code, found["format"], found["job"]) == (0, "everstep.explain/1", "toy")
    told = found["explanation"]
    text = cli("explain", "i1", "--store", store).stdout
    assert text.splitlines()[:3] == told["headline"]
    for section in told["sections"]:
        assert all(f"  {line}\n" in text for line in section["lines"])
    assert told["verdict"]["class"] == told["outcome"]["class"] == "XID_79"
    assert told["outcome"]["ending"] == "recovered"
    assert told["outcome"]["resumed_in"] == pytest.approx(10.9)
    assert told["decisions"][0]["rung"]["action"] == "restart_elsewhere"
    assert told["results"][0]["commit"] == 12.9


def test_an_incident_is_named_whole_or_by_its_beginning(cli: Any, store: Path) -> None:
    last = cli("explain", "--last", "--store", store).stdout
    assert last == cli("explain", "i3", "--store", store).stdout
    assert last == cli("explain", "--store", store).stdout
    assert "stop with exit code 94" in last
    several = cli("explain", "i", "--store", store)
    assert several.exit_code == 2
    assert "One of: i1, i2, i3" in several.stderr
    missing = cli("explain", "x", "--store", store)
    assert missing.exit_code == 1
    assert "The newest: i1, i2, i3" in missing.stderr
    assert cli("explain", "i1", "--last", "--store", store).exit_code == 2


def test_what_is_left_is_of_the_limits_of_the_job_and_not_of_who_asks(
    cli_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = recovered()
    agent.policy = Policy(limits=Limits(per_fingerprint=None, no_progress=8, window_restarts=9))
    agent.fails(TIMEOUT)
    job_of(tmp_path / "store", agent)
    monkeypatch.setenv("EVERSTEP_WINDOW_RESTARTS", "77")
    _, status = cli_json("status", "--store", tmp_path / "store")
    assert status["standing"]["budget"] == [
        "8 of 8 attempts without progress left", "9 of 9 restarts in 24 h left",
    ]  # fmt: skip
    _, told = cli_json("explain", "--store", tmp_path / "store")
    lines = next(s["lines"] for s in told["explanation"]["sections"] if s["title"] == "budget")
    assert lines == status["standing"]["budget"]


def test_a_job_without_an_incident_says_so(cli: Any, toy_store: Path) -> None:
    result = cli("explain", "--store", toy_store)
    assert result.exit_code == 1
    assert "job toy has no incident" in result.stderr
    listed = cli("incidents", "--store", toy_store)
    assert (listed.exit_code, listed.stdout) == (0, "toy: no incident yet\n")
    assert cli("status", "--store", toy_store).exit_code == 0


def test_incidents_lists_them_all_with_figures(cli: Any, cli_json: Any, store: Path) -> None:
    code, found = cli_json("incidents", "--store", store)
    assert (code, found["format"]) == (0, "everstep.incidents/1")
    seen = [(i["incident"], i["class"], i["action"], i["ending"]) for i in found["incidents"]]
    assert seen == [
        ("i1", "XID_79", "restart_elsewhere", "recovered"),
        ("i2", "USER_EXCEPTION", "restart_in_place", "stopped"),
        ("i3", "USER_EXCEPTION", "stop", "stopped"),
    ]
    assert found["figures"]["rate"] == 1.0
    assert found["by_class"]["USER_EXCEPTION"]["stopped"] == 2
    lines = cli("incidents", "--store", store).stdout.splitlines()
    assert lines[0].split() == ["incident", "when", "class", "root", "step", "action", "result"]
    assert "rank 2 on node b (gpu)" in lines[1]
    assert "recovered in 10.9 s" in lines[1]
    assert lines[-1].startswith("toy: 1 of 1 incident recovered (100%), 2 stopped as meant, ")


def test_status_of_a_stopped_job_names_the_next_command(
    cli: Any, cli_json: Any, store: Path
) -> None:
    code, found = cli_json("status", "--store", store)
    assert (code, found["format"], found["owner"]) == (0, "everstep.status/1", "")
    assert (found["standing"]["state"], found["standing"]["final"]) == ("stopped", True)
    assert found["standing"]["next"].startswith("everstep retry --reset-budget ")
    assert found["standing"]["next"].endswith(f"--store {store} --job toy")
    assert found["checkpoint"] is None
    text = cli("status", "--store", store).stdout
    assert "toy in " in text.splitlines()[0]
    assert "stopped: USER_EXCEPTION on rank 1 at step 1300" in text.splitlines()[0]
    assert "attempts without progress left" in text
    assert "node b" not in text.splitlines()[0]


def test_status_shows_who_runs_it_and_what_would_load(cli_json: Any, toy_store: Path) -> None:
    job = open_store(str(toy_store)).job("toy")
    me = identity_of(os.getpid(), "me")
    job.acquire_owner(me, is_alive=lambda _: True)
    found = cli_json("status", "--store", toy_store)[1]
    assert (found["standing"]["state"], found["standing"]["next"]) == ("running", "")
    assert found["owner"] == f"pid {me.pid} on {me.host}"
    assert (found["checkpoint"]["step"], found["checkpoint"]["attempt"]) == (15, 2)
    assert found["checkpoint"]["step"] == list_job(job, 0.0).checkpoints[1].step
    job.release_owner(me)
    assert cli_json("status", "--store", toy_store)[1]["standing"]["state"] == "stopped"


def test_an_owner_that_is_dead_runs_nothing(cli_json: Any, toy_store: Path) -> None:
    job = open_store(str(toy_store)).job("toy")
    me = identity_of(os.getpid(), "me")
    dead = OwnerIdentity("dead", me.host, me.boot, me.pid, me.started + 1)
    job.acquire_owner(dead, is_alive=lambda _: False)
    assert cli_json("status", "--store", toy_store)[1]["owner"] == ""
    job.release_owner(dead)
    job.acquire_owner(OwnerIdentity("other", "elsewhere", "boot", 1, 1), is_alive=lambda _: False)
    assert cli_json("status", "--store", toy_store)[1]["owner"] == "pid 1 on elsewhere"


def test_status_of_a_finished_job(cli: Any, cli_json: Any, tmp_path: Path) -> None:
    job_of(tmp_path / "store", finished())
    found = cli_json("status", "--store", tmp_path / "store")[1]["standing"]
    assert (found["state"], found["next"]) == ("finished", "")
    assert "step 2000 is committed" in cli("status", "--store", tmp_path / "store").stdout


def test_a_damaged_record_is_named_and_left_out(cli: Any, cli_json: Any, store: Path) -> None:
    (bad,) = store.glob("jobs/toy/history/*-result-*")
    bad.write_bytes(b"damaged")
    for command in ("explain", "incidents", "status"):
        code, found = cli_json(command, "--store", store)
        assert code == 1
        assert [bad.name in problem for problem in found["problems"]] == [True]
        assert bad.name in "".join(cli(command, "--store", store).stdout.split())
    # Another record tells of the commit, later; the time to the first new step is lost.
    (row,) = [i for i in cli_json("incidents", "--store", store)[1]["incidents"]
              if i["incident"] == "i1"]  # fmt: skip
    assert (row["ending"], row["resumed_in"]) == ("recovered", None)


def test_commands_read_through_the_cache_and_live_without_it(
    cli: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cli("incidents", "--store", store).stdout
    (file,) = (tmp_path / "state" / "history").iterdir()
    assert file.name.endswith("-toy.sqlite3")
    assert cli("incidents", "--store", store).stdout == first
    file.write_bytes(b"damaged")
    assert cli("incidents", "--store", store).stdout == first
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(file))
    assert cli("incidents", "--store", store).stdout == first
