"""``retry``, ``node`` and ``mode``: an operator's words, recorded once and honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pasts import job_of, recovered, stopped
from told import FOUR

from everstep.faults.decide import begin
from everstep.faults.fold import fold
from everstep.faults.history import Stamp, WordRecord, unpack
from everstep.faults.situation import Policy, Situation
from everstep.faults.suspicion import Rules, standings
from everstep.store import Job


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def words(job: Job) -> list[WordRecord]:
    return [r for r in unpack(job.history().entries).records if isinstance(r, WordRecord)]


def starts(job: Job) -> bool:
    """Whether an agent that came now would begin an attempt."""
    claims = job.highest_claim()
    situation = Situation(FOUR, highest_claim=claims)
    past = unpack(job.history().entries).records
    decision = begin(past, situation, Policy(), Stamp("next", 2e9, 1.0, "other")).decision
    return not decision.stops


def test_a_job_that_was_stopped_for_good_starts_after_retry(cli_json: Any, store: Path) -> None:
    """F3: starting it again is no way around; an operator's word is."""
    job = job_of(store, stopped())
    assert not starts(job)
    code, said = cli_json("retry", "--reset-budget", "fixed the division", "--store", store)
    assert (code, said["format"], said["recorded"]) == (0, "everstep.word/1", True)
    assert said["next"].startswith(f"everstep run --store {store} --job toy ")
    assert starts(job)
    (word,) = words(job)
    assert (word.word, word.reason, word.attempt) == ("reset-budget", "fixed the division", 3)
    assert word.by.count("@") == 1
    assert word.at.wall == pytest.approx(said["at"])


def test_said_again_nothing_is_recorded(cli: Any, cli_json: Any, store: Path) -> None:
    job = job_of(store, stopped())
    for command in (
        ("retry", "--reset-budget", "fixed"),
        ("node", "exclude", "a", "--reason", "cable"),
        ("node", "pardon", "a"),
        ("mode", "advise"),
    ):
        assert cli_json(*command, "--store", store)[1]["recorded"]
        count = len(words(job))
        again = cli_json(*command, "--store", store)
        if command[0] != "retry":
            assert (again[0], again[1]["recorded"], bool(again[1]["note"])) == (0, False, True)
            assert len(words(job)) == count
    text = cli("mode", "advise", "--store", store).stdout
    assert text == "nothing to record for toy: it is advise already\n"


def test_a_node_is_excluded_and_pardoned(cli: Any, store: Path) -> None:
    job = job_of(store, recovered())

    def state(node: str) -> str:
        return standings(fold(unpack(job.history().entries).records), Rules())[node].state

    assert cli("node", "exclude", "c", "--reason", "loose cable", "--store", store).exit_code == 0
    assert state("c") == "excluded"
    assert "c, until it is pardoned: loose cable" in cli("status", "--store", store).stdout
    assert cli("node", "pardon", "c", "--store", store).exit_code == 0
    assert state("c") == "probation"


def test_a_node_that_nobody_knows_is_recorded_with_a_warning(cli: Any, store: Path) -> None:
    job = job_of(store, recovered())
    result = cli("node", "exclude", "nodo-1", "--reason", "cable", "--store", store)
    assert result.exit_code == 0
    assert "no record of the job names node nodo-1; known are: a, b, c, d, e" in result.stderr
    assert [word.subject for word in words(job)] == ["nodo-1"]


def test_a_word_stands_behind_all_that_was_recorded(cli: Any, store: Path) -> None:
    """Also while an agent runs: its attempt is the newest that was claimed."""
    job = job_of(store, recovered())
    cli("node", "exclude", "a", "--reason", "x", "--store", store)
    cli("retry", "--reset-budget", "y", "--store", store)
    records = [r for _, r in fold(unpack(job.history().entries).records).records]
    assert [r for r in records if isinstance(r, WordRecord)] == records[-2:]
    assert [r.sequence for r in records[-2:]] == [3, 4]


@pytest.mark.parametrize(
    "command",
    [
        ("retry",),
        ("retry", "--reset-budget", " "),
        ("retry", "--reset-budget", "x" * 501),
        ("node", "exclude", "a"),
        ("node", "exclude", "", "--reason", "x"),
        ("mode", "perhaps"),
    ],
)
def test_what_cannot_be_said_is_refused(cli: Any, store: Path, command: tuple[str, ...]) -> None:
    job = job_of(store, stopped())
    assert cli(*command, "--store", store).exit_code == 2
    assert words(job) == []


def test_bytes_that_are_no_text_can_be_said(cli: Any, store: Path) -> None:
    job = job_of(store, stopped())
    assert cli("retry", "--reset-budget", "caf\udce9", "--store", store).exit_code == 0
    assert words(job)[0].reason == "caf\\udce9"
