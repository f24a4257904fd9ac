"""The package as a whole: what importing costs, what a wheel holds, what must be in no file."""

from __future__ import annotations

import ast
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from email.parser import HeaderParser
from pathlib import Path

import pytest

import everstep
from everstep import errors
from everstep.core import exits
from everstep.core.settings import PARSERS, Settings

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "everstep"
TORCH_FREE = ("core", "errors", "store", "keeper", "cadence", "drill", "testing", "cli")
INVARIANTS = [f"S{n}" for n in range(1, 10)] + [f"R{n}" for n in range(1, 9)]


def _modules_without_torch() -> list[str]:
    paths = [
        path
        for room in TORCH_FREE
        for path in (*SOURCE.glob(f"{room}.py"), *(SOURCE / room).rglob("*.py"))
    ]
    names = [path.relative_to(SOURCE.parent).with_suffix("") for path in paths]
    return ["everstep", *(".".join(n.parts).removesuffix(".__init__") for n in names)]


def test_importing_everstep_and_the_torch_free_rooms_does_not_import_torch() -> None:
    # The drill's small script is run as a user's would be, and imported by nobody.
    scripts = ("__main__", "drill.small")
    modules = [name for name in _modules_without_torch() if not name.endswith(scripts)]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imported torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_resolve() -> None:
    assert {name for name in everstep.__all__ if getattr(everstep, name, None) is None} == set()
    assert dir(everstep) == everstep.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = everstep.nothing  # type: ignore[attr-defined]


def _tree(root: type[errors.EverstepError]) -> Iterator[type[errors.EverstepError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


ERRORS = [error for error in _tree(errors.EverstepError) if error.__module__ == errors.__name__]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [error.code for error in ERRORS]
    assert len(codes) == len(set(codes))
    assert not [code for code in codes if not re.fullmatch(r"EVS-\d{3}", code)]
    assert not [error for error in ERRORS if "code" not in vars(error)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_an_error_says_what_it_is_and_survives_pickling(error: type[errors.EverstepError]) -> None:
    assert error.__doc__
    one = error("rank 3 failed.", hint="Do this.")
    again = pickle.loads(pickle.dumps(one))
    assert type(again) is error
    assert str(again) == str(one) == f"{error.code}: rank 3 failed. Do this."


def test_every_exit_code_has_a_meaning() -> None:
    codes = {name: value for name, value in vars(exits).items() if name.isupper()}
    numbers = [value for value in codes.values() if isinstance(value, int)]
    assert sorted(numbers) == sorted(exits.MEANING)
    assert set(exits.MEANING) >= exits.FINAL


def test_every_setting_has_a_meaning_and_a_parser_that_reads_its_default() -> None:
    for item in fields(Settings):
        assert item.metadata["doc"].endswith("."), item.name
        if item.default != "":
            assert PARSERS[item.metadata["parse"]](str(item.default)) == item.default


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy: building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    shutil.copytree(SOURCE, copy / "src" / "everstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, copy],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_the_marker_of_types(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if name.startswith("everstep/")}
    wanted = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*.py")}
    assert wanted <= names
    assert "everstep/py.typed" in names


def test_the_wheel_asks_for_torch_only_in_extras(wheel: zipfile.ZipFile) -> None:
    """So installing everstep never replaces the torch that is there."""
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert always
    assert not [line for line in always if re.match(r"(torch|numpy|nvidia)", line)]
    assert metadata["Version"] == everstep.__version__


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# Put together here, so that this file does not hold what it looks for.
_PRIVATE = re.compile(
    "|".join(
        (
            r"https?://[\w.-]*" + r"(pypi|pythonhosted|anaconda|artifactory|nexus|devpi)",
            r"--(extra-)?" + r"index-url|--find-" + r"links|--trusted-" + r"host",
            r"(?<![\w.~$}/])/(" + r"root|work|Users|home)/\w",
        )
    )
)


def test_no_tracked_file_holds_a_registry_or_a_path_of_one_machine() -> None:
    found = []
    for path in _tracked():
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if _PRIVATE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


_PICKLES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def _could_unpickle(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.startswith(_PICKLES) for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith(_PICKLES)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
        return "weights_only=True" not in ast.unparse(node)
    return False


def test_s8_no_room_can_unpickle() -> None:
    """S8: nobody imports pickle, and torch's loader is only called for weights."""
    found = [
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _could_unpickle(node)
    ]
    assert not found


def _named_by_tests() -> str:
    """Names and docstrings of all test functions."""
    words = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                words += [node.name.replace("_", " "), ast.get_docstring(node) or ""]
    return "\n".join(words)


NAMED = _named_by_tests()


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_every_invariant_is_named_by_a_test_that_holds_it(invariant: str) -> None:
    assert re.search(rf"\b{invariant}\b", NAMED, re.IGNORECASE)
