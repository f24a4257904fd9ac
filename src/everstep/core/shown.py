"""Words of others in everstep's own lines.

Owns: what of a text a terminal would obey instead of showing it. Never does: touch what workers
print themselves. Called by: whoever prints an event, an error or a record.
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters but for tabs and line ends, marks that turn the order of a line, what no
encoding writes."""


def shown(text: str) -> str:
    """``text`` in which a terminal finds nothing to obey: ``\\x1b`` stands where the character
    did."""
    return _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")
