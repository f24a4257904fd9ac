"""The signatures of failures, as data: one TOML file a domain, and a user's file on top.

Owns: the form of the files, its checks, the compiled patterns. Never does: look at logs. Called by:
:mod:`everstep.faults.match`, :mod:`everstep.faults.judge`, the commands.

A pattern is a regular expression of RE2: it has no backreference and no look-around, and no text
can make it slow. Its groups named ``rank``, ``ranks``, ``node``, ``address``, ``pci``, ``pid``,
``path`` and ``step`` say where it happened; ``ranks`` goes before the rank that said it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

import msgspec
import re2

from everstep.errors import BadCatalog
from everstep.faults.records import UNKNOWN, Action, Domain, Role, Severity, Source
from everstep.faults.topics import TOPICS

Kind = Literal["node", "program", "peer", "watchdog", "signal"]
"""How deep evidence lies (rule 1); the first goes before the last."""
Place = Literal["rank", "gpu", "node", "switch", "pod", "job", "service", "path", "process", "peer"]
"""What a fact of the class stands on: it says which ranks and which node are its root."""
GROUPS = frozenset(("rank", "node", "address", "pci", "pid", "path", "step", "ranks"))


_NEGATIVE = re.compile(r"(?i)\bno(?:t|ne)?\b|without|[(|]no |n[.]t\b|\bNo[A-Z]")
_FOLLOWS = "(?i)caused by previous xid"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which a class shows. What is None is as its class says. ``re`` or ``xid``:
    NVIDIA's numbers, in all the forms in which programs print them. ``unless``: a line that matches
    this one, too, is another thing. ``sources``: where alone it counts (empty: anywhere)."""

    re: str = ""
    xid: tuple[int, ...] = ()
    unless: str = ""
    sources: tuple[Source, ...] = ()
    severity: Severity | None = None
    role: Role | None = None
    action: Action | None = None
    domain: Domain | None = None
    kind: Kind | None = None
    place: Place | None = None
    depth: int | None = None
    survivable: bool | None = None


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class. ``depth`` orders facts of one kind on one node: the one that explains the others has
    the larger number. ``survivable``: training may go on after it, and then nothing is done."""

    name: str = msgspec.field(name="class")
    action: Action
    kind: Kind
    place: Place
    advice: str
    pattern: tuple[Entry, ...] = ()
    severity: Severity = "fatal"
    role: Role = "root"
    depth: int = 50
    survivable: bool = False
    domain: Domain | None = None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the catalogue."""

    domain: Domain
    fault: tuple[Fault, ...]


class Meaning(msgspec.Struct, frozen=True):
    """What a line says that shows a class in one of its ways."""

    fault: str
    domain: Domain
    action: Action
    kind: Kind
    place: Place
    severity: Severity
    role: Role
    depth: int
    survivable: bool


class Expression:
    """A regular expression that is compiled when it is first looked for: of the hundreds of them
    one incident needs a few, and the agent waits for the verdict."""

    __slots__ = ("_made", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._made: re2._Regexp | None = None

    def search(self, text: str) -> re2._Match | None:
        """The first match."""
        if self._made is None:
            self._made = re2.compile(self.text, _quiet())
        return self._made.search(text)


class Pattern(msgspec.Struct, frozen=True):
    """An entry with everything that its class says. ``captures``: it has groups; ``negative``: it
    is a denial itself."""

    meaning: Meaning
    sources: frozenset[str]
    text: str
    captures: bool
    negative: bool
    regex: Expression
    unless: Expression | None


class Catalog(msgspec.Struct, frozen=True):
    """All patterns. ``known`` gives each class's advice, ``meanings`` what it means by default.
    ``search`` numbers the patterns that a text may match and, after them, the topics."""

    patterns: tuple[Pattern, ...]
    known: dict[str, Fault]
    meanings: dict[str, Meaning]
    search: re2.Set

    def found_in(self, text: str) -> list[int]:
        """The numbers of the patterns that a text may match, in their order."""
        numbers = self.search.Match(text) or ()
        return sorted(number for number in numbers if number < len(self.patterns))


def load(*extra: Path) -> Catalog:
    """The catalogue that comes along, with the files of a user on top: their patterns are looked
    for first, and a class of theirs replaces the defaults of one of the same name. Raises
    :class:`~everstep.errors.BadCatalog`, which names file and entry."""
    if not extra:
        return _own()
    files = [_parsed(path.name, _read(path)) for path in extra]
    for name, file in files:
        check(name, file)
    return _catalog([*files, *_own_files()])


def parse(name: str, text: str) -> File:
    """One file's text, checked. Raises :class:`~everstep.errors.BadCatalog`."""
    return _parsed(name, text.encode())[1]


@cache
def _own() -> Catalog:
    return _catalog(_own_files())


def _own_files() -> list[tuple[str, File]]:
    folder = resources.files("everstep.faults") / "catalog"
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")),
                   key=lambda item: item.name)  # fmt: skip
    return [_parsed(item.name, item.read_bytes()) for item in found]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCatalog(
            f"the catalogue file {path} cannot be read: {error.strerror}.",
            hint="Name a TOML file that this user may read.",
        ) from error


def _parsed(name: str, raw: bytes) -> tuple[str, File]:
    try:
        return name, msgspec.convert(tomllib.loads(raw.decode()), File)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadCatalog(
            f"{name} is no catalogue of signatures: {error}.",
            hint="docs/guides/failures.md shows the form of an entry.",
        ) from error


def check(name: str, file: File) -> None:
    """Every expression of a file, compiled. Raises :class:`~everstep.errors.BadCatalog`, which
    names the entry that is wrong; those that come along are checked by a test."""
    for fault in file.fault:
        for number, entry in enumerate(fault.pattern, 1):
            where = f"{name}, {fault.name}, pattern {number}"
            if bool(entry.re) == bool(entry.xid):
                raise BadCatalog(f"{where} has not exactly one of `re` and `xid`.")
            regex = _compiled(where, entry.re or _of_xid(entry.xid))
            if unknown := set(regex.groupindex) - GROUPS:
                raise BadCatalog(
                    f"{where} captures {sorted(unknown)}, which nothing reads.",
                    hint=f"Groups may be named {', '.join(sorted(GROUPS))}.",
                )
            if entry.unless:
                _compiled(where, entry.unless)


def _catalog(files: Iterable[tuple[str, File]]) -> Catalog:
    known: dict[str, Fault] = {}
    patterns: list[Pattern] = []
    for _, file in files:
        for fault in file.fault:
            whole = msgspec.structs.replace(fault, domain=fault.domain or file.domain)
            known.setdefault(fault.name, whole)
            patterns += (
                _pattern(whole, each)
                for entry in fault.pattern
                for each in _with_follower(entry, whole)
            )
    if UNKNOWN not in known:
        raise BadCatalog(f"no file describes the class {UNKNOWN}.")
    meanings = {name: _meaning(fault, Entry()) for name, fault in known.items()}
    return Catalog(tuple(patterns), known, meanings, _search(patterns))


def _search(patterns: list[Pattern]) -> re2.Set:
    options = re2.Options()
    options.max_mem = 256 << 20
    options.never_capture = True
    made = re2.Set.SearchSet(options)
    for text in (*(pattern.text for pattern in patterns), *TOPICS.values()):
        made.Add(text)
    made.Compile()
    return made


def _with_follower(entry: Entry, fault: Fault) -> list[Entry]:
    """An Xid 45 names the number that it follows, also on the partners of the device that failed:
    where only followers are left of a fatal one, it is the host's, and no device is blamed."""
    if not entry.xid or {43, 45} & set(entry.xid):
        return [entry]
    unless = f"{_FOLLOWS}|{entry.unless}" if entry.unless else _FOLLOWS
    own = msgspec.structs.replace(entry, unless=unless)
    if (entry.severity or fault.severity) != "fatal":
        return [own]
    codes = "|".join(str(number) for number in entry.xid)
    told = Entry(re=rf"{_FOLLOWS} (?:{codes})\b", severity="degraded", place="switch")
    return [own, told]


def _pattern(fault: Fault, entry: Entry) -> Pattern:
    text = entry.re or _of_xid(entry.xid)
    return Pattern(
        _meaning(fault, entry), frozenset(entry.sources), text, "(?P<" in text,
        _NEGATIVE.search(text) is not None, Expression(text),
        Expression(entry.unless) if entry.unless else None,
    )  # fmt: skip


def _meaning(fault: Fault, entry: Entry) -> Meaning:
    """What an entry says itself, else what its class says."""
    domain = entry.domain or fault.domain
    assert domain is not None, "the file's domain stands in for it"
    return Meaning(
        fault.name, domain, entry.action or fault.action, entry.kind or fault.kind,
        entry.place or fault.place, entry.severity or fault.severity, entry.role or fault.role,
        fault.depth if entry.depth is None else entry.depth,
        fault.survivable if entry.survivable is None else entry.survivable,
    )  # fmt: skip


def _compiled(where: str, text: str) -> re2._Regexp:
    try:
        made = re2.compile(text, _quiet())
    except re2.error as error:
        reason = error.args[0] if error.args else "it is no expression of RE2"
        said = reason.decode() if isinstance(reason, bytes) else str(reason)
        raise BadCatalog(
            f"{where}: the expression {text!r} is not valid: {said}.",
            hint="RE2 has no look-around and no backreferences.",
        ) from error
    if made.search("") is not None:
        raise BadCatalog(f"{where}: the expression {text!r} matches every line.")
    return made


@cache
def _quiet() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options


def _of_xid(numbers: tuple[int, ...]) -> str:
    """The kernel's form, and those of tools that repeat it (``XID error: 79``, ``xid=79``, DCGM's
    metric)."""
    codes = "|".join(str(number) for number in numbers)
    device = (
        r"(?:PCI:|GPU[ :-]*)?(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2})?)(?:\.0)?"
    )
    return (
        rf"(?i)\bxid\b(?: (?:error|event|code)s?)?[ :=#]*(?:\({device}\)[ :]*)?"
        rf"(?:(?:error|code)[ :=#]+)?(?:{codes})\b(?:,? ?pid=['\"]?(?P<pid>\d+))?"
        rf"|xid_errors\b(?:\{{[^}}]*\}})?[ =:]+(?:{codes})\b"
    )


assert set(get_args(Source)) >= {"log", "kernel"}
