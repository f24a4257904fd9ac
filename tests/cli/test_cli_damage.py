"""``ls``, ``show`` and ``verify`` on a store with damaged records and newer formats (S3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.store import records
from everstep.store.digests import digest
from everstep.store.records import Index, Manifest

NEWEST = "jobs/toy/steps/000000000015-000002"
INDEX = f"{NEWEST}/rank-00000-of-00002.index"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newer(data: bytes) -> bytes:
    """The same record as version 3 of its kind."""
    head = data[:12] + (3).to_bytes(4, "little") + data[16:24]
    return head + digest(head + data[40:]) + data[40:]


def newer_manifest(store: Path) -> None:
    path = store / NEWEST / "manifest"
    path.write_bytes(newer(path.read_bytes()))


def newer_index(store: Path) -> None:
    replace_index(store, newer)


def later_codec(store: Path) -> None:
    def change(data: bytes) -> bytes:
        index = records.decode(data, Index, "index")
        first = msgspec.structs.replace(index.chunks[0], codec="zstd")
        return records.encode(msgspec.structs.replace(index, chunks=(first, *index.chunks[1:])))

    replace_index(store, change)


def replace_index(store: Path, change: Callable[[bytes], bytes]) -> None:
    data = change((store / INDEX).read_bytes())
    (store / INDEX).write_bytes(data)
    path = store / NEWEST / "manifest"
    manifest = records.decode(path.read_bytes(), Manifest, "manifest")
    first = msgspec.structs.replace(manifest.ranks[0], length=len(data), digest=digest(data))
    ranks = (first, *manifest.ranks[1:])
    path.write_bytes(records.encode(msgspec.structs.replace(manifest, ranks=ranks)))


def listed(cli_json: Any, store: Path) -> tuple[int, list[tuple[int, str, bool]], list[str]]:
    code, listing = cli_json("ls", store)
    (job,) = listing["jobs"]
    rows = [(c["step"], c["state"], c["loads"]) for c in job["checkpoints"]]
    return code, rows, job["problems"]


def test_a_damaged_branch_is_a_problem_and_what_is_sound_is_listed(
    cli: Any, cli_json: Any, toy_store: Path
) -> None:
    key = "jobs/toy/attempts/000002/branch"
    flip(toy_store / key)
    code, rows, problems = listed(cli_json, toy_store)
    assert code == 1
    assert rows == [(20, "committed", False), (15, "committed", True), (10, "committed", False)]
    assert [problem.startswith(f"EVS-206: {key} ") for problem in problems] == [True]
    text = " ".join(cli("ls", toy_store).stdout.split())
    assert f"fail {problems[0]}" in text
    assert (text.count("not known"), text.count("left behind")) == (2, 0)
    code, shown = cli_json("show", toy_store)
    assert (code, shown["step"], shown["problems"]) == (1, 15, problems)
    assert [(o["attempt"], o["source"]) for o in shown["lineage"]] == [(2, "unknown")]
    assert "attempt 2 began where nobody can say" in cli("show", toy_store).stdout
    for deep in ([], ["--deep"]):
        code, result = cli_json("verify", toy_store, *deep)
        assert (code, result["ok"], result["proved"]) == (1, False, "")
        assert [c["ok"] for c in result["checkpoints"]] == [True, True, True]
        assert [(a["ok"], a["problems"]) for a in result["around"]] == [(False, problems)]


def test_a_damaged_manifest_does_not_load_next(cli: Any, cli_json: Any, toy_store: Path) -> None:
    flip(toy_store / NEWEST / "manifest")
    code, rows, problems = listed(cli_json, toy_store)
    assert (code, problems) == (0, [])
    assert rows == [(20, "committed", False), (15, "damaged", False), (10, "committed", True)]
    text = " ".join(cli("ls", toy_store).stdout.split())
    assert text.count("loads next") == 1
    assert "EVS-206" in text
    assert cli_json("show", toy_store)[1]["step"] == 10


def test_a_damaged_index_or_a_chunk_known_to_be_does_not_load_next(
    cli_json: Any, toy_store: Path
) -> None:
    pack = next((toy_store / "jobs/toy/packs").glob("000000000015-*-rank-00000-*"))
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    cli_json("verify", toy_store, "--deep")
    wanted = [(20, "verified", False), (15, "damaged", False), (10, "verified", True)]
    assert listed(cli_json, toy_store)[1] == wanted
    assert cli_json("show", toy_store)[1]["step"] == 10
    flip(toy_store / INDEX)
    assert listed(cli_json, toy_store)[1] == wanted


@pytest.mark.parametrize("make", [newer_manifest, newer_index, later_codec])
def test_a_checkpoint_of_a_newer_format_is_neither_damaged_nor_what_loads(
    cli: Any, cli_json: Any, toy_store: Path, make: Callable[[Path], None]
) -> None:
    """A restart stops at it: nothing loads next."""
    make(toy_store)
    _, rows, _ = listed(cli_json, toy_store)
    assert rows == [(20, "committed", False), (15, "newer format", False), (10, "committed", False)]
    text = " ".join(cli("ls", toy_store).stdout.split())
    assert "EVS-207" in text
    assert "loads next" not in text
    refused = cli("show", toy_store)
    assert refused.exit_code == 1
    assert "EVS-207" in refused.stderr
    for deep in ([], ["--deep"]):
        code, result = cli_json("verify", toy_store, *deep)
        assert (code, result["ok"]) == (1, False)
        told = [
            (c["step"], c["ok"], c["newer_format"], c["recorded"]) for c in result["checkpoints"]
        ]
        assert told == [(20, True, False, True), (15, False, True, False), (10, True, False, True)]
        assert result["checkpoints"][1]["problems"][0].startswith("EVS-207")
    stated = cli("verify", toy_store, "--deep").stdout
    assert "neither verified nor skipped" in stated
    assert "Damaged" not in stated
    assert listed(cli_json, toy_store)[1][1] == (15, "newer format", False)


def test_verify_deep_reads_what_is_no_checkpoint(cli: Any, cli_json: Any, toy_store: Path) -> None:
    assert cli_json("verify", toy_store, "--deep")[0] == 0
    path = toy_store / "jobs/toy/steps/000000000020-000001/tombstone"
    path.write_bytes(b"scribble")
    assert cli_json("verify", toy_store)[0] == 0, "only --deep reads it"
    code, result = cli_json("verify", toy_store, "--deep")
    assert (code, [c["ok"] for c in result["checkpoints"]]) == (1, [True, True])
    assert "tombstone is not a record" in result["around"][0]["problems"][0]
    text = cli("verify", toy_store, "--deep").stdout
    assert "fail toy besides: " in text
    assert "named above" in text
    assert "Other checkpoints of the job were not read" not in text


def test_verify_of_one_says_that_the_others_were_not_read(cli: Any, toy_store: Path) -> None:
    assert "Other checkpoints of the job were not read" in cli(
        "verify", toy_store, "--deep", "--at", "15"
    ).stdout  # fmt: skip
