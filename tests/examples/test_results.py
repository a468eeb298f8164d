"""examples/results.py: where the examples keep their results."""

import pathlib
import runpy

import pytest

from tests.support.processes import ROOT

FOLDER = runpy.run_path(str(ROOT / "examples" / "results.py"))["folder"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/big/cache", "/big/cache"), (None, "/home/ada/.cache"), ("", "/home/ada/.cache"), ("cache", "/home/ada/.cache")],
)
def test_results_lie_in_the_cache_folder_of_the_user(
    variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users of one machine share no folder; a relative path in the variable does not count, as XDG says."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert FOLDER("digits") == f"{expected}/epochckpt/digits"


def test_no_example_shares_a_folder_with_other_users() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in pathlib.Path(ROOT, "examples").glob("*.py")}
    assert not [name for name, source in sources.items() if "gettempdir" in source]
    assert 'results.folder("digits")' in sources["train_digits.py"]
    assert 'results.folder("digits")' in sources["evaluate_digits.py"]
