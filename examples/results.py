"""Where the examples keep their results unless a flag names another place."""

import os


def folder(name):
    """A folder of this user's own: `$XDG_CACHE_HOME/epochckpt/<name>`, by default below `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # unset, or one of the relative paths that the XDG specification tells to ignore
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "epochckpt", name)
