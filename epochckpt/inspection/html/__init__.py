"""What notebooks show: each view is one string of HTML that needs nothing else, no script and no other file.

Pure functions of rows. Views are bounded in size whatever the rows are, and several of them on one page do not disturb
one another: no element has an id, and the style says the same in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from epochckpt.inspection.html import compare
from epochckpt.inspection.html import epoch as html_epoch
from epochckpt.inspection.html import overview as html_overview
from epochckpt.inspection.html.parts import page
from epochckpt.inspection.html.sharding import Nodes, Thumbs
from epochckpt.inspection.rows import Diff, EpochDetail, ItemRow, LeafStats, Overview


def overview(found: Overview) -> str:
    """A directory: its epochs and attempts, newest first, and what else lies there."""
    return page(html_overview.overview(found))


def epoch(found: EpochDetail) -> str:
    """One epoch: nodes, metadata, and the tree of each item with the cut of its arrays drawn."""
    nodes = html_epoch.nodes_of(found)
    thumbs = Thumbs(nodes)
    body = html_epoch.epoch(found, thumbs, nodes)
    return page(body, style=thumbs.style)


def item(found: ItemRow, total_nbytes: int) -> str:
    """One item. Shares are of `total_nbytes`: the bytes of its epoch."""
    nodes = Nodes(html_epoch.item_nodes(found))
    thumbs = Thumbs(nodes)
    body = html_epoch.item(found, total_nbytes, thumbs, nodes, html_epoch.chars_per_leaf([found]))
    return page(body, style=thumbs.style)


def stats(found: Sequence[LeafStats]) -> str:
    """Statistics of arrays, with histograms; what is not finite stands out."""
    return page(compare.stats(found))


def diff(found: Diff) -> str:
    """What changed between two epochs: counts, then what changed most."""
    return page(compare.diff(found))
