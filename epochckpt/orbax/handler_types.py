"""The names that steps of Orbax record of its handlers, where the form of an item depends on them."""

import functools
from collections.abc import Mapping

from epochckpt._lazy import ocp


@functools.cache
def json_handler() -> str:
    """The handler of JSON."""
    return ocp.handlers.JsonCheckpointHandler.typestr()


@functools.cache
def array_handler() -> str:
    """The handler of a single array."""
    return ocp.handlers.ArrayCheckpointHandler.typestr()


@functools.cache
def tree_handler() -> str:
    """The handler of PyTrees."""
    return ocp.handlers.PyTreeCheckpointHandler.typestr()


@functools.cache
def jax_key_handler() -> str:
    """The handler of a JAX random key."""
    return ocp.handlers.JaxRandomKeyCheckpointHandler.typestr()


@functools.cache
def key_folders() -> Mapping[str, str]:
    """Handlers that keep arrays one folder deeper, beside a JSON file, and the folder."""
    return {
        jax_key_handler(): "jax_random_key",
        ocp.handlers.NumpyRandomKeyCheckpointHandler.typestr(): "np_random_key",
    }


def takes_array(handler: str) -> bool:
    """Whether it takes a single array, and no tree."""
    return handler in key_folders() or handler == array_handler()
