"""``everstep classify``: files in, verdicts out, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from everstep.cli import main

KNOWN: dict[str, Any] = {
    "id": "a-1", "nodes": {"n-0": [0, 1]},
    "evidence": [
        {"source": "log", "rank": 1, "node": "n-0", "time": 3.0, "text": "ValueError: x"},
        {"source": "exit", "rank": 1, "node": None, "time": None, "text": "", "exit_code": 1},
    ],
}  # fmt: skip
UNKNOWN: dict[str, Any] = {
    "id": "b-2",
    "evidence": [
        {"source": "exit", "rank": 0, "node": "n-0", "time": 1.0, "text": "x", "exit_code": -9}
    ],
}
EXPECT = {
    "class": "USER_EXCEPTION", "domain": "user_code", "action": "stop", "root_ranks": [1],
    "root_node": None, "victim_ranks": [],
}  # fmt: skip


def lines(folder: Path, *cases: dict[str, Any]) -> str:
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["classify", *arguments])


def test_json_is_one_object_an_incident_in_input_order(tmp_path: Path) -> None:
    ran = run("--json", lines(tmp_path, UNKNOWN, KNOWN))
    first, second = (json.loads(line) for line in ran.output.splitlines())
    assert (first["id"], first["class"]) == ("b-2", "UNKNOWN_ROOT")
    assert (second["id"], second["class"], second["action"]) == ("a-1", "USER_EXCEPTION", "stop")
    assert second["root_ranks"] == [1]
    assert second["evidence"][0]["text"] == "ValueError: x"
    assert set(second) >= {"domain", "root_node", "root_domain", "victim_ranks", "confidence"}
    assert ran.exit_code == 1


def test_exit_code_is_0_where_all_is_known(tmp_path: Path) -> None:
    ran = run(lines(tmp_path, KNOWN))
    assert ran.exit_code == 0
    assert "USER_EXCEPTION" in ran.output
    assert "rank 1" in ran.output


def test_a_plain_log_is_one_incident(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(b"step 1\n[rank2]: KeyError: 'a'\n\xff\n")
    ran = run("--json", str(path))
    (line,) = ran.output.splitlines()
    assert json.loads(line)["root_ranks"] == [2]


def test_score_prints_shares_and_each_miss(tmp_path: Path) -> None:
    wrong = {**UNKNOWN, "expect": {**EXPECT, "root_ranks": [0]}}
    ran = run("--score", lines(tmp_path, {**KNOWN, "expect": EXPECT}, wrong))
    assert "50.0%" in ran.output
    assert "b-2: class: expected USER_EXCEPTION, got UNKNOWN_ROOT" in ran.output
    assert "b-2: missed stop" in ran.output


def test_score_as_json(tmp_path: Path) -> None:
    ran = run("--json", "--score", lines(tmp_path, {**KNOWN, "expect": EXPECT}))
    result = json.loads(ran.output)
    assert (result["class"], result["root"], result["counts"]["cases"]) == (1.0, 1.0, 1)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    assert "EVS-801" in run(str(tmp_path / "none.log")).output
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x", "evidence": []}\n{"id": 3, "evidence": []}\n')
    ran = run(str(bad))
    assert ran.exit_code == 2
    assert "line 2" in ran.output
    assert "EVS-801" in run().output
