"""The fields of Orbax options, with those of the options in them."""

import dataclasses
from typing import Any

import orbax.checkpoint as ocp

NESTED: dict[str, Any] = {
    "async_options": ocp.AsyncOptions,
    "file_options": ocp.options.FileOptions,
    "multiprocessing_options": ocp.options.MultiprocessingOptions,
}


def fields_of(options: Any, prefix: str = "") -> set[str]:
    """Names of all fields, those of the options in it with a dot."""
    found: set[str] = set()
    for field in dataclasses.fields(options):
        kind = NESTED.get(field.name)
        found |= {prefix + field.name} if kind is None else fields_of(kind, f"{field.name}.")
    return found


def option(name: str, value: Any) -> dict[str, Any]:
    """The argument of the options with this name."""
    outer, _, inner = name.rpartition(".")
    return {outer: NESTED[outer](**{inner: value})} if outer else {inner: value}
