"""The metadata of an item: a pytree of descriptions that is read like a dict, and as a target."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Self

import jax


@dataclasses.dataclass(frozen=True)
class _Aside:
    """Something that goes with a tree without being part of its structure: any two are equal."""

    value: Any = dataclasses.field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata:
    """A pytree with properties, like Orbax's class of this name (`ocp.StandardCheckpointer().metadata(path)`).

    It may be mapped over, indexed, and passed as a restore target. `tree` is the plain tree: dicts and lists of
    `ocp.metadata.ArrayMetadata` and its kin, in the order of the saved tree. `custom_metadata` is the JSON that was
    saved with the item, or None; `use_zarr3` is always False.
    """

    use_zarr3 = False

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree = tree
        self.custom_metadata = custom_metadata

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        """The top level of the tree, as JAX wants it."""
        aside = _Aside(self.custom_metadata)
        if isinstance(self.tree, dict):  # JAX would sort the keys, which those of an OrderedDict are not
            return [(jax.tree_util.DictKey(key), child) for key, child in self.tree.items()], (tuple(self.tree), aside)
        found, treedef = jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=lambda node: node is not self.tree)
        children = [(path[0] if path else jax.tree_util.GetAttrKey("tree"), child) for path, child in found]
        return children, (treedef, aside)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> Self:
        shape, aside = aux
        tree = dict(zip(shape, children, strict=True)) if isinstance(shape, tuple) else shape.unflatten(children)
        return cls(tree, aside.value)

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
