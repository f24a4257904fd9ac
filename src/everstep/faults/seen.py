"""A text as its reader sees it, and the way back to what was written.

Owns: what a terminal does not show (colours, control characters, marks of no width), lines that
it broke. Never does: know what a secret is. Called by: :mod:`everstep.faults.redact`.

What is found in a view is replaced in the text itself; what stands around it stays there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from everstep.faults.lines import NARROWEST, WIDTHS, starts_anew

_CODE = (
    rb"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
    rb"|\xc2\x9b[0-9;:?]*[ -/]*[@-~]"
    # The same where a text was written as code or as JSON.
    rb"|\\{1,4}(?:x1[bB]|u001[bB]|033|e)\[[0-9;:?]*[ -/]*[@-~]"
)
_UNSEEN = (
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x84\x86-\x9f\xad]"
    rb"|\xe2\x80[\x8b-\x8f\xaa-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf"
)
_REST = rb"\[[0-9]{0,3}(?:;[0-9]{1,3})*m"
"""A colour whose first character was lost."""
_STEPS = tuple(re.compile(b"(?:%b)+" % step) for step in (_CODE, _UNSEEN, _REST))
_ANY = re.compile(b"(?:%b|%b|%b)+" % (_CODE, _UNSEEN, _REST))
_BREAK = re.compile(rb"\r?\n")
_EDGE = b"|"


class _Cut(NamedTuple):
    """From offset ``at[i]`` on, ``gone[i]`` bytes are missing."""

    at: list[int]
    gone: list[int]

    def back(self, place: int) -> int:
        number = bisect_right(self.at, place)
        return place + self.gone[number - 1] if number else place


class View(NamedTuple):
    """``text`` is what is seen. ``wrapped``: lines in it were joined."""

    text: bytes
    cuts: tuple[_Cut, ...] = ()
    wrapped: bool = False

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where what is seen there (not nothing) stands in the text as it was written."""
        last = stop - 1
        for cut in reversed(self.cuts):
            start, last = cut.back(start), cut.back(last)
        return start, last + 1


def views(raw: bytes, begins: bytes) -> Iterator[View]:
    """The ways in which ``raw`` can be read; as a rule one. ``begins`` is a pattern of what may
    begin right behind a colour."""
    shown = View(raw)
    for pattern in _STEPS:
        shown = _without(shown, pattern)
    if shown.cuts:
        shown = _edged(shown, re.compile(begins))
    if (whole := _unwrapped(shown)) is not None:
        yield whole
    yield shown
    if shown.cuts:  # a colour ends a word, too
        text, cut = _replaced(raw, ((*m.span(), _EDGE) for m in _ANY.finditer(raw)))
        yield View(text, (cut,))


def _without(view: View, pattern: re.Pattern[bytes]) -> View:
    if not pattern.search(view.text):
        return view
    text, cut = _replaced(view.text, ((*m.span(), b"") for m in pattern.finditer(view.text)))
    return View(text, (*view.cuts, cut))


def _edged(view: View, begins: re.Pattern[bytes]) -> View:
    """Set apart what begins where something was left out."""
    starts = (match.start() for match in begins.finditer(view.text))
    edges = [
        (start, start, _EDGE)
        for start in starts
        if start and view.span(start, start + 1)[0] > view.span(start - 1, start)[1]
    ]
    if not edges:
        return view
    text, cut = _replaced(view.text, edges)
    return View(text, (*view.cuts, cut))


def _unwrapped(view: View) -> View | None:
    """With the lines joined that a terminal broke at its width; None where there are none."""
    if len(view.text) <= NARROWEST or b"\n" not in view.text:
        return None
    ends = [match.span() for match in _BREAK.finditer(view.text)]
    starts = [0, *(stop for _, stop in ends)]
    lengths = [start - begun for begun, (start, _) in zip(starts, ends, strict=False)]
    counted = Counter(lengths)
    breaks = [
        (*span, b"")
        for span, length in zip(ends, lengths, strict=True)
        if length >= NARROWEST
        and (length in WIDTHS or counted[length] > 1)
        and not starts_anew(view.text[span[1] : span[1] + 200].decode("latin-1"))
    ]
    if not breaks:
        return None
    text, cut = _replaced(view.text, breaks)
    return View(text, (*view.cuts, cut), wrapped=True)


def _replaced(raw: bytes, spans: Iterable[tuple[int, int, bytes]]) -> tuple[bytes, _Cut]:
    parts: list[bytes] = []
    at: list[int] = []
    gone: list[int] = []
    end = missing = length = 0
    for start, stop, put in spans:
        parts += (raw[end:start], put)
        length += start - end + len(put)
        missing += stop - start - len(put)
        at.append(length)
        gone.append(missing)
        end = stop
    return b"".join((*parts, raw[end:])), _Cut(at, gone)
