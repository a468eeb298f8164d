"""Stop conditions as text, such as the value of a flag."""

import ast
from collections.abc import Sequence
from typing import Any

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.stop import CONDITIONS, Condition


def parsed(text: str) -> Condition:
    """The condition that a text describes: those of `ec.stop`, with values as arguments, joined by `|` and `&`.

    For example `max_epochs(100) | nan("loss")`. The `repr` of a condition describes that condition.

    Raises:
        InvalidArgumentError: it describes none.
    """
    try:
        return _of_syntax(ast.parse(f"({text.strip()})", mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        problem = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise InvalidArgumentError(f"it is no stop condition: {problem}") from None


def _of_syntax(node: ast.expr) -> Condition:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _of_syntax(left) | _of_syntax(right)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _of_syntax(left) & _of_syntax(right)
        case ast.Name(id=name) if isinstance(condition := _named(name), Condition):
            return condition
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if isinstance(condition := _named(name), Condition):
            return condition
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named) if isinstance(made := _named(name), type):
            return made(*map(_of_value, values), **_keywords(named))
    raise ValueError("expected conditions joined by | and &, such as max_epochs(100) | nan('loss')")


def _keywords(named: Sequence[ast.keyword]) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for each in named:
        if each.arg is None:
            raise ValueError("** stands before a value; write each argument by itself")
        if each.arg in keywords:
            raise ValueError(f"{each.arg} is given twice")
        keywords[each.arg] = _of_value(each.value)
    return keywords


def _of_value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no value; write a text in quotes") from None


def _named(name: str) -> type[Condition] | Condition:
    if name not in CONDITIONS:
        raise ValueError(f"there is no condition {name!r}; {_text.near(name, CONDITIONS)}")
    return CONDITIONS[name]
