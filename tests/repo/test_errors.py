"""The tree of errors is as it is drawn."""

import inspect
import re

from epochckpt import errors


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    """Every class is drawn below its parent, with the built-in classes that it also has."""
    drawn: dict[str, str] = {}
    above = ["EpochCheckpointError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([│ ]*)[├└]── (\w+)", line):
            depth = len(found[1]) // 4 + 1
            drawn[found[2]] = above[depth - 1]
            above[depth:] = [found[2]]
    classes = {
        name: one
        for name, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.EpochCheckpointError) and one is not errors.EpochCheckpointError
    }
    assert drawn == {name: one.__mro__[1].__name__ for name, one in classes.items()}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"[│ ]*[├└]── (\w+) \((\w+)", line):
            assert any(base.__name__ == found[2] for base in classes[found[1]].__mro__), line
