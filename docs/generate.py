"""Writes docs/reference from the code, so that the two cannot differ.

    python docs/generate.py            writes the pages
    python docs/generate.py --check    says which pages are out of date, and fails where one is

Owns: the pages whose first line says so. Never does: change anything else. Called by: `make check`,
`make docs-reference`, the tests.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from inspect import getdoc
from pathlib import Path
from typing import Any

import click

import everstep
from everstep import errors
from everstep.agent.flags import SETTINGS as FLAGS
from everstep.cli import COMMANDS, main
from everstep.core import exits
from everstep.core.points import VARIABLE as FAULTS
from everstep.core.settings import Settings, variable

REFERENCE = Path(__file__).parent / "reference"
MADE = "<!-- Made by docs/generate.py from the code. Change the code, then: make docs-reference -->"

Row = tuple[str, ...]


def settings_page() -> str:
    """Every setting: variable, flag of `everstep run`, default, meaning."""
    rows = [
        (
            f"`{variable(item.name)}`",
            f"`{_flag(item.name)}`" if item.name in FLAGS else "",
            f"`{item.default}`" if item.default != "" else "",
            item.metadata["doc"],
        )
        for item in fields(Settings)
    ]
    intro = (
        "A flag of `everstep run` goes before its variable, a variable before what the script says "
        "in `everstep.Options`, and that before the default. Times are seconds, or a number with "
        "`ms`, `s`, `m`, `h` or `d`."
    )
    outro = (
        f"`{FAULTS}` makes a process fail at a named point; it is for tests and drills, and "
        "everything is inert without it."
    )
    table = _table(("variable", "flag", "default", "meaning"), rows)
    return _page("Settings", intro, table, outro)


def exit_codes_page() -> str:
    """Every exit code of `everstep run` and of its workers."""
    rows = [(str(code), meaning) for code, meaning in sorted(exits.MEANING.items())]
    final = ", ".join(str(code) for code in sorted(exits.FINAL))
    intro = "What `everstep run` ends with, and what its workers tell it by ending."
    outro = f"Workers that end with {final} end the job: the agent does not start them again."
    return _page("Exit codes", intro, _table(("code", "meaning"), rows), outro)


def errors_page() -> str:
    """The tree of errors."""
    rows = [
        (
            f"`{error.code}`",
            f"{'· ' * depth}`{error.__name__}`",
            "yes" if error.retryable else "no",
            error.blame,
            _first_paragraph(error),
        )
        for error, depth in _tree(errors.EverstepError, 0)
    ]
    intro = (
        "Every error that everstep raises on purpose is an `everstep.EverstepError` with a stable "
        "code. A dot before a name says that it is a kind of the one above. *Retryable*: the same "
        "call may work later. *Blame*: whose doing it most likely is."
    )
    return _page("Errors", intro, _table(("code", "class", "retryable", "blame", "meaning"), rows))


def cli_page() -> str:
    """Every command with its arguments and options."""
    context = click.Context(main, info_name="everstep")
    parts = [_table(("command", "what it does"), [(f"`{n}`", doc) for n, doc in COMMANDS.items()])]
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None, name
        parts.append(f"## everstep {name}")
        parts.append(_run_flags() if name == "run" else _command(command, name, context))
    return _page("Command line", *parts)


def api_page() -> str:
    """What a script calls, with the docstrings as they are in the code."""
    intro = "Everything that a script needs is in `everstep` itself. Importing it imports no torch."
    parts = [f"## everstep.{name}\n\n{_api(getattr(everstep, name), name)}" for name in _API]
    return _page("Python", intro, *parts)


PAGES: dict[str, Callable[[], str]] = {
    "api.md": api_page,
    "settings.md": settings_page,
    "exit-codes.md": exit_codes_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
}


_API = ("attach", "Run", "Options", "EverstepError")


def out_of_date() -> list[str]:
    """Names of the pages that differ from what the code gives now."""
    return [name for name, make in PAGES.items() if _read(REFERENCE / name) != make()]


def write() -> None:
    """Write all pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")


def _api(thing: Any, name: str) -> str:
    """Signature and docstring; of a class that a script does not make, those of its methods."""
    parts = [] if thing is everstep.Run else [_call(thing, name)]
    parts.append(_markdown(getdoc(thing) or ""))
    if thing is everstep.Run:
        for method in (held for key, held in vars(thing).items() if key[0] != "_"):
            parts += [f"### run.{method.__name__}", _call(method, f"run.{method.__name__}")]
            parts.append(_markdown(getdoc(method) or ""))
    return "\n\n".join(parts)


def _call(thing: Callable[..., object], name: str) -> str:
    """How it is called, without the modules that names of types are from."""
    signature = inspect.signature(thing, eval_str=True)
    shown = [p for key, p in signature.parameters.items() if key != "self"]
    text = str(signature.replace(parameters=shown))
    called = f"{name}{re.sub(r'(?:[a-z_]+[.])+(?=[A-Z])', '', text)}".replace(" -> None", "")
    if len(called) > 100:
        arguments = ",\n".join(f"    {p}" for p in shown)
        called = f"{name}(\n{re.sub(r'(?:[a-z_]+[.])+(?=[A-Z])', '', arguments)},\n)"
    return f"```python\n{called}\n```"


def _markdown(text: str) -> str:
    """A docstring's roles and literals, as a reader without Sphinx knows them."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _run_flags() -> str:
    by_name = {item.name: item for item in fields(Settings)}
    rows = [(f"`{_flag(name)} VALUE`", by_name[name].metadata["doc"]) for name in FLAGS]
    intro = (
        "    everstep run [TORCHRUN FLAGS] [OPTIONS] SCRIPT [ARGUMENTS]...\n\n"
        "Takes every flag of the installed torchrun, in both spellings, and every `PET_*` "
        "variable, with one difference: without `--max-restarts`, workers are restarted until "
        "a [budget](../guides/budgets.md) of the job is used up, or a failure is deterministic. "
        "`everstep run --help` lists them all. Its own:"
    )
    return f"{intro}\n\n{_table(('option', 'meaning'), rows)}"


def _command(command: click.Command, name: str, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(("everstep", name, *command.collect_usage_pieces(context)))
    parts = [f"    {usage}", _unwrapped(command.help or "")]
    rows = [
        (f"`{record[0]}`", _unwrapped(record[1]))
        for param in command.get_params(context)
        if isinstance(param, click.Option) and "--help" not in param.opts
        if (record := param.get_help_record(context)) is not None
    ]
    if rows:
        parts.append(_table(("option", "meaning"), rows))
    if isinstance(command, click.Group):
        for child in sorted(command.commands):
            parts.append(f"### everstep {name} {child}")
            parts.append(_command(command.commands[child], f"{name} {child}", parent))
    return "\n\n".join(part for part in parts if part)


def _tree(
    error: type[errors.EverstepError], depth: int
) -> Iterator[tuple[type[errors.EverstepError], int]]:
    yield error, depth
    for kind in sorted(error.__subclasses__(), key=lambda kind: kind.code):
        yield from _tree(kind, depth + 1)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _first_paragraph(thing: object) -> str:
    return _unwrapped((getdoc(thing) or "").split("\n\n")[0]).replace("``", "`")


def _unwrapped(text: str) -> str:
    """Paragraphs on one line each; lines that click was told to keep stay as they are."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        "\n".join(f"    {line}" for line in paragraph.splitlines()[1:])
        if paragraph.startswith("\b")
        else " ".join(paragraph.split())
        for paragraph in paragraphs
    )


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((MADE, f"# {title}", *parts)) + "\n"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if old := out_of_date():
            sys.exit(f"out of date: {', '.join(old)} in docs/reference. Run: make docs-reference")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        write()
