"""The examples in public docstrings run as written, each in an empty directory of its own."""

import doctest
import inspect
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec

MINIMUM = 15  # public docstrings with an example
GLOBALS = {"ec": ec, "jax": jax, "jnp": jnp, "np": np, "ocp": ocp}  # what every example may use without an import


def public_objects() -> Iterator[tuple[str, Any]]:
    """What `epochckpt.__all__` names, and what the modules among it name."""
    for name in ec.__all__:
        found = getattr(ec, name)
        yield name, found
        if isinstance(found, ModuleType):
            names = getattr(found, "__all__", None) or [n for n in vars(found) if not n.startswith("_")]
            for inner in names:
                one = getattr(found, inner)
                if str(getattr(one, "__module__", "")).startswith("epochckpt"):
                    yield f"{name}.{inner}", one


def examples() -> dict[str, doctest.DocTest]:
    """By name, the docstrings with an example: of the public objects and of their public methods."""
    finder, found, seen = doctest.DocTestFinder(recurse=False), {}, set[int]()
    for name, one in public_objects():
        members = {f"{name}.{n}": v for n, v in vars(one).items() if n[:1] != "_"} if inspect.isclass(one) else {}
        for title, value in {name: one, **members}.items():
            documented = inspect.isroutine(value) or isinstance(value, type | property | ModuleType)
            if documented and id(value) not in seen:
                seen.add(id(value))
                for test in finder.find(value, title, module=False, globs=GLOBALS):
                    found[title] = test
    return {title: test for title, test in found.items() if test.examples}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_written(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=options).run(EXAMPLES[name], out=report.append)
    assert not report, "".join(report)


def test_there_are_enough_examples() -> None:
    assert len(EXAMPLES) >= MINIMUM, list(EXAMPLES)
