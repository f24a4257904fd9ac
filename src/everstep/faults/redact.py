"""Secrets out of texts, before anything is stored.

Owns: the forms of tokens, keys, passwords and signed addresses, and what stands in their place.
Never does: I/O. Called by: the agent's watch and whoever stores evidence or a verdict.

Patterns are those of RE2: time grows with the text's length and nothing else. They work on bytes,
so text that is no UTF-8 hides nothing. What is left over must still be of use: names of variables,
hosts and users stay, and so do digests, commit hashes, paths and the words of ordinary lines.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import re2

from everstep.faults.seen import View, views

GONE = "[redacted]"
ROUNDS = 8
"""One pass may bring two parts together that are a secret only then; more than a few never came
up."""

T = TypeVar("T", bound=msgspec.Struct)

_WORD = r"[a-z0-9_.-]*(?:password|passwd|passphrase|passcode)"
"""Names, in any case, of passwords."""
_MORE = rf"{_WORD}[a-z0-9_.-]+|[a-z0-9_.-]*pwd[a-z0-9_.-]*"
"""Names that are such of something else as well: of a file, of a length, of the folder in hand."""
_NAME = (
    r"(?:[a-z0-9_.-]*[_.-])?(?:api|secret|private|encryption|signing|account|subscription"
    r"|access|secret[_-]?access|shared[_-]?access)[_-]?key(?:[_-]?id)?"
    r"|(?:[a-z0-9_.-]*[_.-])?(?:client|app|webhook|shared|jwt|oauth|consumer|token)[_-]?secret"
    r"|(?:[a-z0-9_.-]*[_.-])?(?:access|auth|refresh|id|session|security|bearer|api|oauth|csrf"
    r"|secret|private|personal|deploy|bot|user|hub|hf|github|gitlab|slack|wandb|vault"
    r"|registry)[_-]?token"
    r"|shared[_-]?access[_-]?signature|x-vault-token|x-amz-security-token|x-auth-token"
)
"""Names, in any case, of other secrets."""
_ENV = r"[A-Z][A-Z0-9_]*_(?:TOKEN|SECRET|KEY|PASS|PAT|CREDENTIALS?)"
"""Names of environment variables whose value is one where it looks like one."""
_QUERY = (
    r"X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature|X-Goog-Credential"
    r"|AWSAccessKeyId|GoogleAccessId|Signature|Key-Pair-Id|Policy|sig|sas|token|access_token"
    r"|id_token|refresh_token|auth|api_key|apikey|api-key|key|secret|client_secret|password|passwd"
    r"|pwd|code"
)
_VALUE = (
    r"""(?:\\+"[^"\\\n]*(?:\\+")?|\\+'[^'\\\n]*(?:\\+')?"""
    r"""|[bfru]{0,2}"(?:[^"\\\n]|\\.)*"?|[bfru]{0,2}'(?:[^'\\\n]|\\.)*'?"""
    r"""|(?:[^\s"',;&<>(){}\[\]\\]|\\[^nrt\s"'])+)"""
)
"""Quoted, also within a quoted text and where the end is cut off; or one word."""
_SETS = r"""\\*['"]?(?:=|:\s*|\s*=>\s*|\\*['"]\s*[:,]\s*|\\*['"]?\]=)"""
"""Between a name and its value: of a shell, of YAML, of JSON, of a tuple's text, of code."""
_NEXT = r"""(?:['"],)?(?:\s|\\\n)+['"]?"""
"""Between a flag and its value: of a shell, of a list's text."""
_PEM = r"(?:\\[nr]|\s)*"
_ESCAPED = r"\\(?:[nrtabfv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|033)|%[0-9a-fA-F]{2}"
_LIMIT = rf"(?:[^A-Za-z0-9_]|^|{_ESCAPED})"
"""What stands before a token: RE2 has no look-behind."""
_FREE = rf"(?:[^A-Za-z0-9_/]|^|{_ESCAPED})"
"""What stands before a name: a file may be named for what is in it."""
_BEGINS = (
    rb"hf_|api_org_|gh[pousr]_|github_pat_|gl(?:pat-|c_|sa_)|xox[a-z]-|xapp-|AKIA|ASIA|AROA|AIDA"
    rb"|AIza|ya29\.|[sr]k_|sk-|npm_|pypi-|nvapi-|dapi|dckr_|hvs\.|gsk_|r8_|SG\.|eyJ"
)
"""How tokens begin that show whose they are."""

_QUOTE = re.compile(r"^[bBfFrRuU]{0,2}\\*(?=[\"'])")
_QUOTES = re.compile(rb"[bBfFrRuU]{0,2}\\*[\"']")
_KEPT = frozenset(("none", "null", "true", "false", "nil", "undefined", "yes", "no", "unset"))
_TRIVIAL = frozenset("*x.-#?")


class _Rule(NamedTuple):
    """``text`` is looked for; its group (all of it where there is none) is replaced, where ``when``
    says so of what was found there."""

    text: str
    when: Callable[[str], bool] = bool
    wraps: bool = False
    """Known in the middle of a line, and so also where a terminal broke it."""


def _mixed(value: str) -> bool:
    """Letters and figures: what a word, a number or a name of code seldom is."""
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _bare(value: str) -> str:
    """Without quotes."""
    return _QUOTE.sub("", value).strip("\"'\\ ")


def _said(value: str) -> bool:
    """A value that says something."""
    bare = _bare(value)
    return len(bare) > 1 and bare.lower() not in _KEPT and not set(bare) <= _TRIVIAL


def _secret(value: str) -> bool:
    """A value that says something, and is no count or index."""
    bare = _bare(value)
    return _said(value) and not (bare.isdigit() and len(bare) < 10)


def _no_path(value: str) -> bool:
    """A secret, and no file or folder where it may be."""
    return _secret(value) and not _bare(value).startswith(("/", "./", "../", "~", "<"))


def _opaque(value: str) -> bool:
    """A value of nothing but itself: no path, no number, nothing short, no word of a few letters,
    no token of a vocabulary."""
    bare = _bare(value)
    return len(bare) >= 8 and not bare.startswith(("/", "./", "~", "<", "[", "{", "(")) and (
        _mixed(bare) or len(bare) >= 20
    )  # fmt: skip


def _long(value: str) -> bool:
    return _opaque(value) and len(_bare(value)) >= 12


def _quoted(value: str) -> bool:
    """A secret that stands in quotes, or looks like one."""
    bare = _bare(value)
    return _opaque(value) or (value != bare and _no_path(value) and len(bare) >= 6)


def _code(value: str) -> bool:
    """The right side of ``name = value`` with spaces is code in tracebacks, or a setting in a file:
    the latter is quoted or no name."""
    bare = _bare(value)
    return _said(value) and (value != bare or (_mixed(bare) and len(bare) >= 12))


def _no_port(value: str) -> bool:
    """What stands between ``host:`` and an @ further on is a port, and a path."""
    return not (value.startswith(GONE) or re.match(r"\d{1,5}(?:[/?#,]|$)", value))


def _no_number(value: str) -> bool:
    """``-u 1000:1000`` is a user and a group."""
    return _said(value) and not value.isdigit()


def _cased(value: str) -> bool:
    """Mixed, or so long and in both cases that it is no word."""
    both = any(c.islower() for c in value) and any(c.isupper() for c in value[1:])
    return _mixed(value) or (both and len(value) >= 20)


def _pair(value: str) -> bool:
    """The base64 of ``user:password``."""
    try:
        said = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:
        return False
    return b":" in said and said.isascii() and said.decode("ascii").isprintable()


def _base64(value: str) -> bool:
    """A line of a key, of which the header stands in another record: evenly mixed letters."""
    upper, lower = (sum(c.isupper() for c in value), sum(c.islower() for c in value))
    return upper >= 12 and lower >= 12 and sum(c.isdigit() for c in value) >= 4


_RULES: tuple[_Rule, ...] = (
    _Rule(
        rf"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        rf"(?:{_PEM}(?:Proc-Type|DEK-Info|Version|Comment):[^\n\\]*)*(?:{_PEM}[A-Za-z0-9+/=]{{16,}})*"
        rf"(?:{_PEM}(?:[A-Za-z0-9+/=]+{_PEM})?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)?"
    ),
    _Rule(r"(?m)(?:^|[\s:])([A-Za-z0-9+/]{64}|[A-Za-z0-9+/]{70})(?:\s|$)", _base64),
    _Rule(
        rf"{_LIMIT}(eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*)*)", wraps=True
    ),
    # Tokens that show by their beginning whose they are.
    _Rule(
        rf"{_LIMIT}(hf_[A-Za-z0-9]{{20,}}|api_org_[A-Za-z0-9]{{20,}}|gh[pousr]_[A-Za-z0-9]{{20,}}"
        r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
        r"|gl(?:c|sa)_[A-Za-z0-9+/=_-]{16,}|xox[a-z]-[A-Za-z0-9-]{10,}"
        r"|xapp-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
        r"|ya29\.[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}"
        r"|pypi-[A-Za-z0-9_-]{30,}|nvapi-[A-Za-z0-9_-]{20,}|dapi[0-9a-f]{32}|dckr_pat_[A-Za-z0-9_-]{20,}"
        r"|hvs\.[A-Za-z0-9_-]{20,}|gsk_[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}|SG\.[A-Za-z0-9_.-]{30,})",
        wraps=True,
    ),
    _Rule(rf"{_LIMIT}(sk-[A-Za-z0-9_-]{{16,}})", _mixed, wraps=True),
    _Rule(r"hooks\.slack\.com/services/([A-Za-z0-9/_-]+)"),
    # Addresses: passwords, users that are tokens, signatures.
    _Rule(r"(?i)[a-z][a-z0-9+.-]*://[^\s/@:'\"<>]*:([^\s/'\"<>]+)@"),
    _Rule(
        r"(?i)[a-z][a-z0-9+.-]*://(?:[^\s/@:'\"<>\[\]]*|\[redacted\]):"
        r"((?:[^\s/@'\"<>]*/)+[^\s/'\"<>]+)@",
        _no_port,
    ),
    _Rule(r"(?i)https?://([^\s/@:'\"<>\[\]]+)@"),
    _Rule(rf"(?i)(?:[?&]|&amp;)(?:{_QUERY})=([^&\s'\"<>()\[\]]+)"),
    _Rule(r"(?i)\bSignature=([A-Za-z0-9+/%=_-]{40,})"),
    # Headers and flags.
    _Rule(
        r"(?i)\bauthorization\\*['\"]?\s*[:=,]\s*\\*['\"]?(?:bearer|basic|token|digest|negotiate"
        r"|apikey|shared\w+)\s+([^\s'\",\[\]\\]+)"
    ),
    _Rule(r"(?i)\bauthorization\\*['\"]?\s*[:=]\s*\\*['\"]?([^\s'\",\[\]\\]{12,})", _mixed),
    _Rule(r"(?i)\bbearer\s+([A-Za-z0-9._~+/=-]{12,})", _cased),
    _Rule(r"(?i)\bbasic\s+([A-Za-z0-9+/]{8,}={0,2})", _pair),
    _Rule(r"(?i)\b(?:set-)?cookie\\*['\"]?:\s*\\*['\"]?([^\s'\"=;,]+=[^\s'\";]+)"),
    _Rule(rf"(?i)--(?:[a-z0-9]+-)*(?:password|passwd)(?:=|{_NEXT})({_VALUE})", _said),
    _Rule(
        rf"(?i)--(?:[a-z0-9]+-)*(?:token|api-?key|secret|access-key|secret-key)(?:=|{_NEXT})"
        rf"({_VALUE})",
        _opaque,
    ),
    _Rule(
        rf"(?:[\s'\"]|^)(?:-u|-U|--user|--proxy-user)(?:=|{_NEXT})['\"]?[^\s:/'\"]+:([^\s'\"]+)",
        _no_number,
    ),
    _Rule(r"(?i)\b(?:mysql\w*|sshpass)\b[^\n|;]*?\s-p\s?([^\s'\"|;-][^\s'\"|;]*)", _no_number),
    # name=value, name: value, "name": "value", and in words.
    _Rule(rf"(?i){_FREE}(?:{_WORD}){_SETS}({_VALUE})", _said),
    _Rule(rf"(?i){_FREE}(?:{_MORE}){_SETS}({_VALUE})", _no_path),
    _Rule(rf"(?i){_FREE}(?:{_NAME}){_SETS}({_VALUE})", _secret),
    _Rule(rf"(?i){_FREE}(?:{_WORD}|{_NAME}) = ({_VALUE})", _code),
    _Rule(rf"(?i){_FREE}(?:{_WORD}|{_NAME}|{_ENV})\\*['\"]?\] = ({_VALUE})", _code),
    _Rule(rf"{_LIMIT}(?:{_ENV})\\*['\"]?(?:=|\]=|:\s+|\s*=>\s*)({_VALUE})", _opaque),
    _Rule(rf"{_LIMIT}[A-Z][A-Z0-9_]*_(?:PASS|PW)=({_VALUE})", _mixed),
    _Rule(rf"(?i){_FREE}(?:token|credentials?)=({_VALUE})", _opaque),
    _Rule(rf"(?i){_FREE}secret=({_VALUE})", _quoted),
    _Rule(rf"(?i){_FREE}pw=({_VALUE})", _opaque),
    _Rule(rf"(?i){_FREE}\\*['\"]?(?:token|secret)(?:\\*['\"])?:\s*({_VALUE})", _long),
    _Rule(r"(?i)\b(?:password|passwd|passphrase) (?:is|was):? ['\"]?([^\s'\"]{6,})", _mixed),
    _Rule(
        r"(?i)\b(?:api|login|access|secret|auth)[ _-]?(?:key|token)(?: is| was)?:? +['\"]?"
        r"([A-Za-z0-9_.+/=-]{12,})",
        _mixed,
    ),
)


def redact(text: str) -> str:
    """``text`` without secrets; :data:`GONE` stands in their place. A text without any is given
    back as it is, and what is redacted stays so when it is redacted again."""
    raw = text.encode("utf-8", "surrogatepass")
    for _ in range(ROUNDS):
        before = raw
        for view in views(raw, _BEGINS):
            if spans := _found(view):
                raw = _without(raw, spans)
                break  # the other views are of what was there before
        if raw == before:
            break
    return raw.decode("utf-8", "surrogatepass")


def redacted(record: T, fields: frozenset[str] | None = None) -> T:
    """A record with its texts redacted, in records inside it, too: all of them, or those in
    ``fields`` of these names. Keys of mappings stay."""
    changed = {}
    for name in record.__struct_fields__:
        before = getattr(record, name)
        after = _value(before, fields, texts=fields is None or name in fields)
        if after is not before:
            changed[name] = after
    return msgspec.structs.replace(record, **changed) if changed else record


def redacted_facts(facts: dict[str, object]) -> dict[str, object]:
    """Facts of JSON types with all texts redacted; the same object where none held a secret."""
    changed: dict[str, object] = _value(facts, None, texts=True)
    return changed


def _value(value: Any, fields: frozenset[str] | None, *, texts: bool) -> Any:
    """The same object where nothing in it is a secret."""
    if isinstance(value, str):
        text = redact(value) if texts else value
        return value if text == value else text
    if isinstance(value, msgspec.Struct):
        return redacted(value, fields)
    if isinstance(value, tuple | list):
        items = type(value)(_value(item, fields, texts=texts) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if isinstance(value, Mapping):
        held = {key: _value(item, fields, texts=texts) for key, item in value.items()}
        return value if all(held[key] is value[key] for key in held) else held
    return value


def _found(view: View) -> list[tuple[int, int]]:
    """Where secrets stand in the text of which this is a view, in order and apart."""
    spans = sorted(
        view.span(*span)
        for number in _all().Match(view.text) or ()
        if _RULES[number].wraps or not view.wrapped
        for span in _matches(number, view.text)
    )
    apart: list[tuple[int, int]] = []
    for start, stop in spans:
        if apart and start < apart[-1][1]:
            apart[-1] = (apart[-1][0], max(stop, apart[-1][1]))
        else:
            apart.append((start, stop))
    return apart


def _matches(number: int, text: bytes) -> Iterator[tuple[int, int]]:
    rule, pattern = _RULES[number], _patterns()[number]
    group = 1 if pattern.groups else 0
    for match in pattern.finditer(text):
        start, stop = match.span(group)
        value = text[start:stop].decode("utf-8", "replace")
        if start < stop and rule.when(value) and _bare(value) != GONE:
            yield start, stop


def _without(raw: bytes, spans: list[tuple[int, int]]) -> bytes:
    """Quotes around a value stay, so that the text can be read as before."""
    parts: list[bytes] = []
    end = 0
    for first, last in spans:
        start, stop = max(end, _edge(raw, first, -1)), _edge(raw, last, 1)
        found = _QUOTES.match(raw, start, stop)
        quote = found.group() if found else b""
        parts += (raw[end:start], quote, GONE.encode(), quote.lstrip(b"bBfFrRuU"))
        end = stop
    return b"".join((*parts, raw[end:]))


def _edge(raw: bytes, at: int, step: int) -> int:
    """The next place from ``at`` on, in that direction, that is not within a character: what a
    view leaves out may have more than one byte."""
    while 0 < at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += step
    return at


@cache
def _options() -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = 64 << 20
    options.log_errors = False
    return options


@cache
def _patterns() -> tuple[re2._Regexp, ...]:
    return tuple(re2.compile(rule.text.encode(), _options()) for rule in _RULES)


@cache
def _all() -> re2.Set:
    """All rules at once: most texts hold nothing, and are looked at only once."""
    made = re2.Set.SearchSet(_options())
    for rule in _RULES:
        made.Add(rule.text)
    made.Compile()
    return made
