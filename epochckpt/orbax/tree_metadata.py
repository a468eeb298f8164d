"""What `item_metadata` gives for a pytree: the tree of Orbax's metadata leaves, and what belongs to it as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax


class _Aside:
    """Something that goes with a tree without being part of its structure: trees are alike whatever it is."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata:
    """A pytree with properties, like Orbax's class of this name (`ocp.StandardCheckpointer().metadata(path)`).

    It may be mapped over, indexed, and passed as a restore target; `tree` is the plain tree.

    Attributes:
        tree: dicts and lists of `ocp.metadata.ArrayMetadata` and its kin.
        custom_metadata: the JSON that was saved with the item, or None.
        use_zarr3: always False.
    """

    use_zarr3 = False

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree, self.custom_metadata = tree, custom_metadata

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        """The top level of the tree, as JAX wants it."""
        if isinstance(self.tree, dict):
            names = list(self.tree)
            return [(jax.tree_util.DictKey(k), self.tree[k]) for k in names], (names, _Aside(self.custom_metadata))
        if isinstance(self.tree, list):
            children = [(jax.tree_util.SequenceKey(i), value) for i, value in enumerate(self.tree)]
            return children, (len(children), _Aside(self.custom_metadata))
        return [(jax.tree_util.GetAttrKey("tree"), self.tree)], (None, _Aside(self.custom_metadata))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> TreeMetadata:
        """The inverse."""
        shape, custom_metadata = aux[0], aux[1].value
        if isinstance(shape, list):
            return cls(dict(zip(shape, children, strict=True)), custom_metadata)
        values = list(children)
        return cls(values[0] if shape is None else values, custom_metadata)

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
