"""Everstep's own lines: nothing in them that a terminal would obey."""

from __future__ import annotations

import io

import pytest
from forked import Start
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.record import Recorder
from everstep.core import exits
from everstep.core.shown import shown


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("rank 0: loss=\u221e, 100 %\n\tat step 3", "rank 0: loss=\u221e, 100 %\n\tat step 3"),
        ("\x1b[2J\rok", "\\x1b[2J\\rok"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\x9b31m\x00\x08", "\\x9b31m\\x00\\x08"),
        ("half \udcff", "half \\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(said: str, seen: str) -> None:
    assert shown(said) == seen


@given(st.text())
def test_lines_can_be_written_and_words_stay(text: str) -> None:
    out = shown(text)
    out.encode()
    assert shown(out) == out
    assert all(
        c.isprintable() or c in "\n\t" or c.isspace() or ord(c) > 0x2FF for c in out if c < "\xad"
    )
    if text.isprintable():
        assert out == text


def test_an_event_is_shown_so() -> None:
    stream = io.StringIO()
    Recorder("job", stream=stream).say("x", "failed: \x1b]0;title\x07\u202e")
    assert stream.getvalue().endswith("failed: \\x1b]0;title\\x07\\u202e\n")


def test_an_error_cannot_paint_the_console(start: Start) -> None:
    script = (
        "import json, os\nos.write(2, b'its own \\x1b[31m words\\n')\n"
        "bad = 'Bad: \\x1b[2J \\u202e'\n"
        "told = {'message': bad, 'extraInfo': {'py_callstack': bad, 'timestamp': '1'}}\n"
        "json.dump({'message': told}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "raise SystemExit(1)\n"
    )
    agent = start("--max-restarts=0", script=script)
    assert agent.wait() == exits.FAILED
    said = agent.err.read_bytes()
    assert said.count(b"\x1b") == 1
    assert b"its own \x1b[31m words\n" in said
    assert "\u202e" not in said.decode()
    assert b"Bad: \\x1b[2J \\u202e" in said
