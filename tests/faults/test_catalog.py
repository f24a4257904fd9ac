"""The catalogue is data: checked when loaded, extended by a user's file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from everstep.errors import BadCatalog
from everstep.faults.catalog import check, load, parse
from everstep.faults.judge import judge
from everstep.faults.read import log

OWN = """
domain = "storage"

[[fault]]
class = "{name}"
action = "wait_and_retry"
kind = "program"
place = "service"
depth = 90
advice = "Wait for the tape robot."
[[fault.pattern]]
re = 'tape robot is (?P<path>\\w+)'
"""


def own(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_a_users_file_adds_a_class(tmp_path: Path) -> None:
    catalog = load(own(tmp_path, OWN.format(name="TAPE_BUSY")))
    verdict = judge(log("x", b"ERROR tape robot is busy\n"), catalog)
    assert (verdict.fault, verdict.domain, verdict.action) == (
        "TAPE_BUSY", "storage", "wait_and_retry",
    )  # fmt: skip
    assert verdict.advice == "Wait for the tape robot."


def test_a_users_file_goes_before_what_comes_along(tmp_path: Path) -> None:
    catalog = load(own(tmp_path, OWN.format(name="DISK_FULL")))
    assert catalog.known["DISK_FULL"].action == "wait_and_retry"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("domain = 'nowhere'\nfault = []", "nowhere"),
        (OWN.format(name="X").replace("depth = 90", "dept = 90"), "dept"),
        (OWN.format(name="X").replace("re = '", "re = '(?<=x)"), "own.toml, X, pattern 1"),
        (OWN.format(name="X").replace("<path>", "<colour>"), "colour"),
        (OWN.format(name="X").replace("re = 'tape robot is (?P<path>\\w+)'", "re = 'x*'"), "every"),
        (OWN.format(name="X").replace("re =", "xid = [1]\nre ="), "exactly one"),
        ("domain = [", "own.toml"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_entry(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadCatalog, match="EVS-800") as refused:
        load(own(tmp_path, text))
    assert said in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCatalog, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_each_expression_that_comes_along_is_valid() -> None:
    folder = resources.files("everstep.faults") / "catalog"
    names = [item.name for item in folder.iterdir() if item.name.endswith(".toml")]
    assert len(names) == 10
    for name in names:
        check(name, parse(name, (folder / name).read_text()))


def test_every_class_says_what_a_person_should_do() -> None:
    assert all(len(fault.advice) > 15 for fault in load().known.values())


def test_parse_gives_the_entries() -> None:
    (fault,) = parse("own.toml", OWN.format(name="X")).fault
    assert (fault.name, fault.place, len(fault.pattern)) == ("X", "service", 1)
