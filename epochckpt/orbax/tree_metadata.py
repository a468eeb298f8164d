"""What `item_metadata` gives for a pytree: the tree of Orbax's metadata leaves, and what belongs to it as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class _Aside:
    """Something that goes with a tree without being part of its structure: any two are equal."""

    value: Any = dataclasses.field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata:
    """A pytree with properties, like Orbax's class of this name (`ocp.StandardCheckpointer().metadata(path)`).

    It may be mapped over, indexed, and passed as a restore target. `tree` is the plain tree: dicts and lists of
    `ocp.metadata.ArrayMetadata` and its kin. `custom_metadata` is the JSON that was saved with the item, or None.
    """

    use_zarr3 = False

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree, self.custom_metadata = tree, custom_metadata

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        """The top level of the tree, as JAX wants it."""
        found, treedef = jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=lambda node: node is not self.tree)
        children = [(path[0] if path else jax.tree_util.GetAttrKey("tree"), child) for path, child in found]
        return children, (treedef, _Aside(self.custom_metadata))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> TreeMetadata:
        return cls(aux[0].unflatten(children), aux[1].value)

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TreeMetadata):
            return self.tree == other.tree and self.custom_metadata == other.custom_metadata
        return self.tree == other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items", "get"):
            return getattr(self.tree, name)
        if name in ("shape", "dtype", "sharding", "name", "directory") and not isinstance(self.tree, dict | list):
            return getattr(self.tree, name)  # a bare array
        raise AttributeError(f"TreeMetadata has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self.tree!r}, custom_metadata={self.custom_metadata!r})"


def plain_target(target: Any) -> Any:
    """A target as a plain tree: `item_metadata` is one, too."""
    return target.tree if isinstance(target, TreeMetadata) else target
