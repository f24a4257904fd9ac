"""``ls``, ``show`` and ``verify`` on a real store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.core.health import Health
from everstep.core.ids import Point
from everstep.core.layout import RankState
from everstep.drill.damage import flip_newest
from everstep.state.objects import Objects, encode_objects
from everstep.store import Branch, OwnerIdentity, open_store
from everstep.testing.snapshots import world_of


def test_ls_tells_which_checkpoint_loads_next(cli_json: Any, toy_store: Path) -> None:
    """S6: the lineage decides, not the largest step."""
    code, listing = cli_json("ls", toy_store)
    assert code == 0
    assert listing["format"] == "everstep.ls/1"
    (job,) = listing["jobs"]
    assert (job["job"], job["attempts"], job["owner"]) == ("toy", 2, "")
    seen = [(c["step"], c["attempt"], c["on_lineage"], c["loads"]) for c in job["checkpoints"]]
    assert seen == [(20, 1, False, False), (15, 2, True, True), (10, 1, True, False)]
    assert {c["state"] for c in job["checkpoints"]} == {"committed"}
    assert all(c["bytes"] > 0 and c["world"] == 2 for c in job["checkpoints"])


def test_ls_as_text_and_from_the_environment(
    cli: Any, toy_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_STORE", str(toy_store))
    result = cli("ls")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("toy in ")
    assert [line.split()[0] for line in lines[2:]] == ["20", "15", "10"]
    assert "loads next" in lines[3]
    assert "left behind" in lines[2]


def test_an_incomplete_step_is_listed_as_such(cli_json: Any, toy_store: Path) -> None:
    job = open_store(str(toy_store)).job("toy")
    job.write_rank(world_of(30, 2, 2)[0], facts={}, unique="u30")
    _, listing = cli_json("ls", toy_store, "--job", "toy")
    assert listing["jobs"][0]["checkpoints"][0] | {"age_s": 0, "bytes": 0} == {
        "step": 30, "attempt": 2, "state": "incomplete", "age_s": 0, "bytes": 0, "world": 2,
        "on_lineage": True, "loads": False, "error": "", "undecided": False,
        "health": "",
    }  # fmt: skip


def test_ls_and_show_tell_the_health_of_a_checkpoint(
    cli: Any, cli_json: Any, toy_store: Path
) -> None:
    job = open_store(str(toy_store)).job("toy")
    for step, figures in ((30, "finite"), (31, "bad")):
        for part in world_of(step, 2, 2, health=Health(figures, "part", "agreed")):
            job.write_rank(part, facts={}, unique=f"u{step}")
        assert job.try_commit(Point(step, 2), 2) == "committed"
    _, listing = cli_json("ls", toy_store, "--job", "toy")
    assert [(c["step"], c["health"]) for c in listing["jobs"][0]["checkpoints"][:3]] == [
        (31, "unsound"), (30, "sound"), (20, ""),
    ]  # fmt: skip
    _, shown = cli_json("show", toy_store, "--at", "30")
    assert shown["health"] == {"figures": "finite", "parameters": "part", "replicas": "agreed"}
    assert "health: figures finite" in cli("show", toy_store, "--at", "30").stdout
    assert "health: not known" in cli("show", toy_store, "--at", "20").stdout


def test_a_store_or_job_that_is_not_there_is_an_error(
    cli: Any, cli_json: Any, toy_store: Path, tmp_path: Path
) -> None:
    code, document = cli_json("ls", tmp_path / "nowhere")
    assert code == 1
    assert (document["format"], document["code"]) == ("everstep.error/1", "EVS-201")
    result = cli("ls", toy_store, "--job", "other")
    assert result.exit_code == 1
    assert "Jobs there: toy" in result.stderr


def test_show_describes_the_checkpoint_that_would_load(cli_json: Any, toy_store: Path) -> None:
    code, shown = cli_json("show", toy_store)
    assert code == 0
    assert (shown["step"], shown["attempt"], shown["world"]) == (15, 2, 2)
    assert shown["environment"] == {"torch": "2.13"}
    tensors = {(t["fqn"], t["owner"]): t for t in shown["tensors"]}
    assert tensors["w", None] == {
        "fqn": "w", "dtype": "float32", "shape": [5, 3], "owner": None, "written_by": [0, 1],
        "loaded_by": [0, 1], "bytes": 60,
    }  # fmt: skip
    assert tensors["rng", 1]["written_by"] == [1]
    assert [o["rank"] for o in shown["objects"]] == [0, 1]
    assert shown["objects"][0]["aliases"] == {"tied": "w"}
    assert [(o["attempt"], o["source"], o["step"]) for o in shown["lineage"]] == [
        (2, "store", 10),
        (1, "fresh", None),
    ]


def test_show_takes_a_step_and_an_attempt(cli: Any, cli_json: Any, toy_store: Path) -> None:
    assert cli_json("show", toy_store, "--at", "20")[1]["attempt"] == 1
    assert cli_json("show", toy_store, "--at", "10-1")[1]["step"] == 10
    missing = cli("show", toy_store, "--at", "10-2")
    assert missing.exit_code == 1
    assert "Steps there: 20, 15, 10" in missing.stderr
    assert cli("show", toy_store, "--at", "ten").exit_code == 2
    text = cli("show", toy_store).stdout
    assert "toy step 15, attempt 2: 2 ranks" in text
    assert "5x3" in text


def test_show_asks_which_job_where_there_are_two(cli: Any, toy_store: Path) -> None:
    other = open_store(str(toy_store)).job("other")
    other.claim(OwnerIdentity("agent", "host", "boot", 1, 1))
    result = cli("show", toy_store)
    assert result.exit_code == 2
    assert "other, toy" in result.stderr


def test_verify_says_what_it_proved(cli: Any, cli_json: Any, toy_store: Path) -> None:
    code, shallow = cli_json("verify", toy_store)
    assert (code, shallow["ok"], shallow["deep"]) == (0, True, False)
    assert "The data itself was not read" in shallow["proved"]
    assert len(shallow["checkpoints"]) == 3
    code, deep = cli_json("verify", toy_store, "--deep")
    assert (code, deep["ok"]) == (0, True)
    assert deep["proved"].startswith("Every bit was read")
    assert all(c["chunks"] > 0 and c["recorded"] for c in deep["checkpoints"])
    states = {c["state"] for c in cli_json("ls", toy_store)[1]["jobs"][0]["checkpoints"]}
    assert states == {"verified"}
    text = cli("verify", toy_store, "--deep", "--at", "15")
    assert text.stdout.startswith("ok toy step 15 attempt 2")


@pytest.mark.parametrize("seed", range(4))
def test_verify_deep_finds_a_flipped_bit(
    cli: Any, cli_json: Any, toy_store: Path, seed: int
) -> None:
    damage = flip_newest(str(toy_store), "toy", seed=seed)
    assert cli_json("verify", toy_store)[0] == 0, "only --deep reads the data"
    code, result = cli_json("verify", toy_store, "--deep")
    assert (code, result["ok"], result["proved"]) == (1, False, "")
    bad = [c for c in result["checkpoints"] if not c["ok"]]
    assert [(c["step"], c["attempt"]) for c in bad] == [(15, 2)]
    assert damage.key.rpartition("/")[2] in bad[0]["problems"][0]
    listed = cli_json("ls", toy_store)[1]["jobs"][0]["checkpoints"]
    assert [c["state"] for c in listed] == ["verified", "damaged", "verified"]
    assert "Damaged checkpoints are kept" in cli("verify", toy_store, "--deep").stdout


def test_verify_of_nothing_is_an_error(cli: Any, tmp_path: Path) -> None:
    open_store(str(tmp_path / "empty"), create=True)
    result = cli("verify", tmp_path / "empty")
    assert result.exit_code == 1
    assert "no committed checkpoint" in result.stderr


def test_the_age_of_a_damaged_checkpoint_is_that_of_its_commit(
    cli_json: Any, toy_store: Path
) -> None:
    """Not of the pack that something has written to since."""
    for path in toy_store.rglob("manifest"):
        os.utime(path, (1000.0, 1000.0))
    flip_newest(str(toy_store), "toy", seed=1)
    cli_json("verify", toy_store, "--deep")
    listed = cli_json("ls", toy_store)[1]["jobs"][0]["checkpoints"]
    assert "damaged" in {c["state"] for c in listed}
    assert all(c["age_s"] > 10**8 for c in listed)


def test_show_names_what_the_user_attached_and_what_its_workers_ran_with(
    cli: Any, cli_json: Any, tmp_path: Path
) -> None:
    """Not the launcher's threads, nor the parts of the record."""
    own = {"torch": "2.13", "threads": "4", "vector extensions": "AVX2", "world": "1"}
    objects = encode_objects(
        Objects(
            treated={"model": "module", "ema": "other"},
            types={"model": "Linear", "ema": "Average"},
            extra=msgspec.msgpack.encode({"step": 5, "environment": own}),
        )
    )
    job = open_store(str(tmp_path), create=True).job("one")
    attempt = job.claim(OwnerIdentity("agent", "host", "boot", 1, 1))
    job.write_branch(attempt, Branch(None, "fresh", "no recovery point exists", 1))
    (made,) = world_of(5, attempt, 1)
    state = msgspec.msgpack.decode(made.state, type=RankState)
    told = msgspec.msgpack.encode(msgspec.structs.replace(state, objects=objects))
    snapshot = msgspec.structs.replace(made, state=memoryview(told))
    job.write_rank(snapshot, facts={"threads": "1", "isa": "AVX", "python": "3.11"}, unique="u")
    assert job.try_commit(Point(5, attempt), 1) == "committed"
    _, shown = cli_json("show", tmp_path)
    assert shown["environment"] == {
        "python": "3.11", "torch": "2.13", "threads": "4", "vector extensions": "AVX2",
    }  # fmt: skip
    assert shown["objects"][0]["types"] == {"model": "Linear", "ema": "Average"}
    text = cli("show", tmp_path).stdout
    assert "model (Linear), ema (Average)" in text
    assert "CPU capability: AVX2" in text
    assert ": 1 rank, " in text
    assert "attempt 1 began at step 0 (no recovery point exists)" in text


def test_a_url_that_nobody_serves_is_answered_with_what_users_have(cli: Any) -> None:
    result = cli("ls", "s3://bucket")
    assert result.exit_code == 2
    assert "faulty" not in result.stderr
    assert "memory" not in result.stderr
