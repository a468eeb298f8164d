"""The documentation as a site: it builds without a warning, and every public name has its place in the reference."""

import inspect
import pathlib
import subprocess
import sys
import types

import pytest

import epochckpt as ec

pytest.importorskip("mkdocs", reason='the site is built by what `pip install -e ".[docs]"` installs')
pytest.importorskip("mkdocstrings")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def members_of(name: str, thing: type) -> set[str]:
    """The public members that a class has from epochckpt, by full name; fields and Orbax's own are not asked for."""
    ours = [base for base in thing.__mro__ if base.__module__.split(".")[0] == "epochckpt"]
    functions = (types.FunctionType, property, classmethod, staticmethod)
    return {
        f"{name}.{member}"
        for base in ours
        for member, value in vars(base).items()
        if not member.startswith("_") and isinstance(value, functions)
    }


def public_names() -> set[str]:
    """Everything that `epochckpt` and its public modules export."""
    found: set[str] = set()
    for name in ec.__all__:
        thing = getattr(ec, name)
        if isinstance(thing, types.ModuleType):
            names = getattr(thing, "__all__", None) or [
                n
                for n, value in vars(thing).items()
                if not n.startswith("_") and getattr(value, "__module__", "") == thing.__name__
            ]
            found |= {f"epochckpt.{name}.{n}" for n in names}
        else:
            home = "epochckpt.errors" if name in vars(ec.errors) else "epochckpt"
            found.add(f"{home}.{name}")
    return found | members_of("epochckpt.CheckpointManager", ec.CheckpointManager) | members_of("epochckpt.Job", ec.Job)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference's pages, built strictly: a broken link or a parameter that does not exist is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return "".join(page.read_text(encoding="utf-8") for page in sorted((folder / "api").rglob("*.html")))


def test_every_public_name_is_in_the_reference(site: str) -> None:
    assert {name for name in public_names() if f'id="{name}"' not in site} == set()


def test_every_public_name_has_a_docstring() -> None:
    """Constants have theirs in the source, below them; the site shows it."""
    undocumented = set()
    for name in public_names():
        thing: object = ec
        for part in name.split(".")[1:]:
            thing = inspect.getattr_static(thing, part) if isinstance(thing, type) else getattr(thing, part)
        if isinstance(thing, type | types.FunctionType | property) and not inspect.getdoc(thing):
            undocumented.add(name)
    assert undocumented == set()
