"""Which names of files are safe in a path, on every file system and in every bucket."""

from __future__ import annotations

import pytest

from epochckpt.format import paths

LONGEST_PART = "a" * 255
LONGEST_PATH = "/".join(["a" * 199] * 5)


@pytest.mark.parametrize(
    "name", ["a", "a b", "größe/0", ".a", "a..b/...", LONGEST_PART, f"x/{LONGEST_PART}", LONGEST_PATH]
)
def test_names_that_a_handlers_file_may_have(name: str) -> None:
    """A part of 255 bytes, a path of 999 characters; a component has no slash."""
    assert paths.is_file_path(name)
    assert paths.is_part(name) is ("/" not in name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/../b",
        "./a",
        "a//b",
        "/a",
        "a/",
        "a\n",
        "a\0",
        "a" * 256,
        "ü" * 128,
        f"{LONGEST_PATH}/a",
        5,
        None,
        b"a",
    ],
)
def test_names_that_it_may_not_have(name: object) -> None:
    """What leaves the folder, what no file system takes, what is no text: a hostile record may say anything."""
    assert not paths.is_file_path(name)
    assert not paths.is_part(name)


def test_a_path_is_put_together_and_taken_apart() -> None:
    """Empty parts are left out; the outermost folder comes first."""
    assert paths.join("", "a", "", "b/c", "") == "a/b/c"
    assert paths.parents("a/b/c") == ["a", "a/b"]
    assert paths.parents("a") == []


@pytest.mark.parametrize("name", [".", "..", "metadata", "rollback.json", "_epochckpt"])
def test_a_folder_beside_the_epochs_is_not_called_as_what_the_directory_has(name: str) -> None:
    assert not paths.is_free_folder(name)
    assert paths.is_free_folder(f"{name}5")
