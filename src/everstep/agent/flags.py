"""What ``everstep run`` was told: torchrun's own parser, with everstep's settings beside it.

Owns: the command line and its defaults. Never does: start anything. Called by: cli, tests.

torchrun's flags and ``PET_*`` variables are not listed here: the parser is the installed torch's
own, so a flag that torch gains is there the same day, in both spellings.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from everstep.agent.script import Kind
from everstep.core import settings as core_settings
from everstep.core.ids import check_job, default_job
from everstep.core.settings import Settings, from_environment
from everstep.errors import UsageError

SETTINGS = (
    "store", "job", "resume", "snapshot_every", "checkpoint_every", "keep_last", "grace",
    "hang_floor", "final_deadline", "events", "state_dir", "on_fault", "verdict_deadline",
    "resume_deadline", "catalog", "per_fingerprint", "no_progress", "window_restarts", "window",
    "useful_share", "skip_batches", "notify", "node_name", "node_pod",
)  # fmt: skip
"""The fields of :class:`Settings` that are flags; the others the agent itself hands to workers."""

UNLIMITED = 2**31 - 1
"""What workers read as TORCHELASTIC_MAX_RESTARTS where no limit was given."""

DEFAULT_MASTER_PORT = 29500

_OWN = "everstep_"
"""What tells everstep's flags from torchrun's in the parser's names."""


@dataclass(frozen=True)
class Launch:
    """One call of ``everstep run``. ``max_restarts`` is None where no limit was given: then the
    rule of progress decides. ``kind`` says what ``name`` is. ``given`` are the settings that
    flags or variables name, ``temporary_logs`` is the folder that torch made for logs where none
    was given. ``json`` asks for events on standard output."""

    settings: Settings
    config: LaunchConfig
    entrypoint: str | Callable[..., object]
    arguments: tuple[str, ...]
    name: str
    kind: Kind
    max_restarts: int | None
    given: frozenset[str]
    temporary_logs: str = ""
    json: bool = False

    @property
    def job_given(self) -> bool:
        """Whether the name of the job was not made up here."""
        return "job" in self.given


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with everstep's flags in a group of their own."""
    made = _Parser(
        prog="everstep run",
        description=(
            "Run a training script as torchrun does, and keep it alive: every torchrun flag and "
            "PET_* variable means what it means there, except that without --max-restarts workers "
            "are restarted until a budget of the job is used up, or a failure is deterministic."
        ),
        parents=[get_args_parser()],
        add_help=False,  # torchrun's comes with the rest
    )
    group = made.add_argument_group("everstep")
    group.add_argument(
        "--json", dest=_OWN + "json", action="store_true",
        help="Print every event as a line of JSON on standard output; what workers print goes to "
        "standard error.",
    )  # fmt: skip
    by_name = {item.name: item for item in fields(Settings)}
    for name in SETTINGS:
        item = by_name[name]
        dashed = "--" + name.replace("_", "-")
        spellings = dict.fromkeys((dashed, "--" + name))
        about = f"{item.metadata['doc']} Also {core_settings.variable(name)}."
        group.add_argument(
            *spellings, dest=_OWN + name, default=None, metavar="VALUE",
            type=_parsed_by(item.metadata["parse"]), help=about.replace("%", "%%"),
        )  # fmt: skip
    return made


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The launch that the command line and ``environment`` ask for.

    Raises :class:`UsageError` for what cannot be read or used; ``SystemExit`` with code 0 after
    ``--help``.
    """
    made = parser()
    if "PET_MAX_RESTARTS" not in environment:
        made.set_defaults(max_restarts=None)
    args = made.parse_args(list(arguments))
    max_restarts: int | None = args.max_restarts
    args.max_restarts = UNLIMITED if max_restarts is None else max_restarts
    try:
        _choose_rendezvous(args)
        config, entrypoint, rest = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as bad:
        raise UsageError(f"the command line cannot be used: {bad}") from bad
    except OSError as error:  # it makes the folder for logs
        raise UsageError(
            f"no folder for logs and error files can be made: {error}.",
            hint="TMPDIR or --log-dir names one where there is room.",
        ) from error
    flags = _flags(args)
    told = replace(from_environment(environment), **flags)
    return Launch(
        settings=_with_defaults(told, args),
        config=config,
        entrypoint=entrypoint,
        arguments=tuple(rest),
        name=args.training_script,
        kind=_kind(args),
        max_restarts=max_restarts,
        given=(core_settings.named(environment) - flags.keys())
        | {name for name, value in flags.items() if value != ""},
        temporary_logs="" if args.log_dir or args.logs_specs else _log_dir(config),
        json=getattr(args, _OWN + "json"),
    )


@dataclass(frozen=True)
class Survey:
    """What a command line would run; ``world`` is None where it is known only at the start."""

    name: str
    kind: Kind
    world: int | None


def survey(arguments: Sequence[str]) -> Survey:
    """A look at a command line for those who hand it to ``everstep run`` later.

    Raises as :func:`parse` does; makes nothing.
    """
    args = parser().parse_args(list(arguments))
    try:
        fewest, most = parse_min_max_nnodes(args.nnodes)
        workers = determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as bad:
        raise UsageError(f"the command line cannot be used: {bad}") from bad
    world = most * workers if fewest == most else None
    return Survey(args.training_script, _kind(args), world)


class _Parser(argparse.ArgumentParser):
    """An error is raised, not printed under the usage of 60 flags; and torchrun's abbreviations
    stay unambiguous beside everstep's flags."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: training_script"):
            message = "no script was given"
        close = _closest(message, self._option_string_actions)
        hint = (f"Did you mean {close}? " if close else "") + "See `everstep run --help`."
        raise UsageError(f"{message}.", hint=hint)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)
        own = [one for one in found if one[0].dest.startswith(_OWN)]
        return own if len(own) == len(found) else [one for one in found if one not in own]


def _closest(message: str, known: Iterable[str]) -> str:
    """The flag that was most likely meant by one that argparse does not know."""
    if not message.startswith("unrecognized arguments"):
        return ""
    unknown = re.findall(r"(--?[\w-]+)", message)
    # A value that follows an unknown flag is taken for the script, so that more may be listed.
    return next(iter(difflib.get_close_matches(unknown[0], known, n=1)), "") if unknown else ""


def _kind(args: argparse.Namespace) -> Kind:
    return "module" if args.module else "program" if args.no_python else "file"


def _log_dir(config: LaunchConfig) -> str:
    return config.logs_specs.root_log_dir if config.logs_specs is not None else ""


def _parsed_by(parse: str) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            return core_settings.PARSERS[parse](text)
        except ValueError as bad:
            raise argparse.ArgumentTypeError(f"{text!r} {bad}") from bad

    return convert


def _choose_rendezvous(args: argparse.Namespace) -> None:
    """The defaults that torchrun applies between its parser and its configuration."""
    alone = (
        args.rdzv_backend == "static"
        and not args.rdzv_endpoint
        and args.master_port is None
        and parse_min_max_nnodes(args.nnodes)[1] == 1
    )
    if args.standalone or alone:
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = DEFAULT_MASTER_PORT


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags name."""
    return {name: value for name in SETTINGS if (value := getattr(args, _OWN + name)) is not None}


def _with_defaults(told: Settings, args: argparse.Namespace) -> Settings:
    job = told.job or default_job(_identity(args), args.training_script_args)
    return replace(told, store=_absolute(told.store), job=check_job(job))


def _identity(args: argparse.Namespace) -> str:
    """What names the script for good: a module's name, or an absolute path."""
    script = str(args.training_script)
    if args.module:
        return script
    return os.path.realpath((shutil.which(script) if args.no_python else None) or script)


def _absolute(store: str) -> str:
    # Workers and a later agent may stand in another folder: one store must have one name.
    return store if "://" in store else os.path.realpath(os.path.expanduser(store))
