"""Following a journal while it is written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.events import Event, encode_line
from everstep.drill.journal import Journal


def _event(n: int) -> Event:
    return Event(wall=float(n), mono=float(n), source="worker", kind="train.log", step=n)


def test_a_missing_file_has_no_events_yet(tmp_path: Path) -> None:
    assert Journal(tmp_path / "none").read_new() == []


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_lines_are_read_once_and_whole_wherever_the_writer_stands(
    cuts: list[int],
) -> None:
    events = [_event(n) for n in range(5)]
    data = b"".join(map(encode_line, events))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        journal, seen, at = Journal(path), [], 0
        for cut in [*sorted(c for c in cuts if c < len(data)), len(data)]:
            with path.open("ab") as file:
                file.write(data[at:cut])
            at = cut
            seen += journal.read_new()
        assert seen == events
        assert journal.torn == 0


def test_a_torn_line_is_counted_and_does_not_hide_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(encode_line(_event(1)) + b'{"wall":1.0,"mo\n' + encode_line(_event(2)))
    journal = Journal(path)
    assert [e.step for e in journal.read_new()] == [1, 2]
    assert journal.torn == 1


def test_the_drill_appends_between_the_lines_of_others(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for n in range(3):
        journal.append(_event(n))
    assert [e.step for e in Journal(journal.path).read_new()] == [0, 1, 2]
