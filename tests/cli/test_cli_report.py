"""How commands speak: streams, errors and exit codes."""

from __future__ import annotations

import json

import click
import msgspec
import pytest
from click.testing import CliRunner

from everstep.cli.report import age, event_line, json_option, reported, reporter, size
from everstep.core.events import Event
from everstep.errors import StoreFull, UsageError


class _Document(msgspec.Struct, frozen=True):
    figure: float
    format: str = "everstep.test/1"


@click.command()
@json_option
@click.option("--fail", type=click.Choice(["usage", "store"]))
@reported
def _command(as_json: bool, fail: str | None) -> int:
    talk = reporter(as_json=as_json)
    talk.say("talking")
    if fail == "usage":
        raise UsageError("bad argument.", hint="Say another.")
    if fail == "store":
        raise StoreFull("no space left.")
    with talk.progress("reading", 10) as advance:
        advance(10)
    talk.result(_Document(0.1), lambda console: console.print("figure 0.1"))
    return 5


def test_text_goes_to_stdout_and_talk_to_stderr() -> None:
    result = CliRunner().invoke(_command)
    assert (result.exit_code, result.stdout, result.stderr) == (5, "figure 0.1\n", "talking\n")


def test_json_is_one_document_on_stdout_and_events_on_stderr() -> None:
    result = CliRunner().invoke(_command, ["--json"])
    assert json.loads(result.stdout) == {"figure": 0.1, "format": "everstep.test/1"}
    assert [json.loads(line)["text"] for line in result.stderr.splitlines()] == ["talking"]


@pytest.mark.parametrize(("fail", "exit_code", "code"), [("usage", 2, 100), ("store", 1, 205)])
def test_errors_have_a_code_a_hint_and_no_traceback(fail: str, exit_code: int, code: int) -> None:
    text = CliRunner().invoke(_command, ["--fail", fail])
    assert text.exit_code == exit_code
    assert text.stderr.splitlines()[-1].startswith(f"everstep: EVS-{code}: ")
    document = json.loads(CliRunner().invoke(_command, ["--fail", fail, "--json"]).stdout)
    assert (document["format"], document["code"]) == ("everstep.error/1", f"EVS-{code}")


def test_an_event_is_one_line() -> None:
    event = Event(wall=0.0, mono=12.5, source="worker", kind="train.log", text="hello", rank=3,
                  step=7)  # fmt: skip
    assert event_line(event, 10.0) == "    2.50s  worker 3  hello (step 7)"
    said = msgspec.structs.replace(event, text="restored step 7 from memory")
    assert event_line(said, 10.0).endswith("restored step 7 from memory"), "not twice"
    other = msgspec.structs.replace(event, text="restored step 77")
    assert event_line(other, 10.0).endswith("restored step 77 (step 7)")


def test_figures_for_people() -> None:
    assert [size(n) for n in (0, 999, 1500, 2_500_000, 3 * 10**12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 TB",
    ]  # fmt: skip
    assert [age(s) for s in (-1, 59, 150, 7300, 200_000)] == ["0 s", "59 s", "2 min", "2 h", "2 d"]
