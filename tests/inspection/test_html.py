"""What a notebook shows: whole, bounded, readable in both themes, and made of nothing that comes from the data."""

import dataclasses
import html.parser
import itertools
import math
import pathlib
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import epochckpt
from epochckpt.inspection import html as html_views
from epochckpt.inspection import leaf_views, rows, views
from epochckpt.inspection.blocks import Block
from epochckpt.inspection.html import style as html_style
from epochckpt.inspection.rows import (
    Diff,
    DiffRow,
    EpochDetail,
    EpochRow,
    FileRow,
    ItemRow,
    LeafRow,
    LeafStats,
    LeftoverRow,
    NodeRow,
    Overview,
    ShardingRow,
)

TAGS = {
    *("div", "span", "i", "style", "details", "summary", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
# Attributes that hold something else than a class or words for people, and what that may be.
FIXED = {
    "style": r"width:[\d.e+-]+%|height:\d+%|opacity:[01]\.\d\d",
    "colspan": r"\d+",
    "open": "",
}
WORDS = {"title"}


class Page(html.parser.HTMLParser):
    """Reads a view as a browser would, and refuses what is not balanced."""

    def __init__(self, view: str | Sequence[Block]) -> None:
        super().__init__()
        self.starts: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(view if isinstance(view, str) else html_views.page(view))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.starts.append((tag, {name: value or "" for name, value in attrs}))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if self._open[-1] == "style" else self.text).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)

    def of_class(self, name: str) -> list[tuple[str, dict[str, str]]]:
        return [(tag, at) for tag, at in self.starts if f"eckpt-{name}" in at.get("class", "").split()]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


HOSTILE = st.sampled_from(
    [
        "<script>alert(1)</script>",
        '" onmouseover="alert(1)',
        "'><img src=x onerror=alert(1)>",
        "</style></div></details>",
        "<!-- ",
        "]]>",
        "&lt;b&gt;&#60;",
        "\x1b[31mred\x1b]0;title\x07",
        "\u202egnp.exe",
        "a\nb\r\0",
        "\ud800\udfff",
        "x" * 10_000,
        "<b>" * 3000,
        "a/b//c/",
        "url(http://example.org)}*{color:red",
    ]
)
# `default` is no name for this test: that item's is left out where it goes without saying.
names = (HOSTILE | st.text(max_size=20)).filter(lambda name: name != "default")
sizes = st.integers(0, 10**15)
floats = st.floats()
maybe = st.none() | floats
moments = st.none() | st.integers(-(10**25), 10**25)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
metrics = st.dictionaries(names, values, max_size=6)


def few(strategy: st.SearchStrategy, most: int = 4) -> st.SearchStrategy:
    return st.lists(strategy, max_size=most).map(tuple)


NODE_STATES = [rows.COMMITTED, rows.DAMAGED, "writing", "written"]
STATES = [rows.COMMITTED, rows.DAMAGED, rows.IN_PROGRESS, rows.ABANDONED]
node_rows = st.builds(NodeRow, names, sizes, maybe, st.sampled_from(NODE_STATES) | names, names)
epoch_rows = st.builds(
    EpochRow,
    epoch=st.integers(0, 10**18),
    state=st.sampled_from(STATES) | names,
    writer=st.sampled_from(["epochckpt", "orbax"]),
    detail=names,
    folder=names,
    save_id=names,
    nodes=few(node_rows),
    nbytes=sizes,
    started_ns=moments,
    committed_ns=moments,
    blocked_secs=maybe,
    age_secs=maybe,
    metrics=metrics,
    sources=st.dictionaries(names, names, max_size=2),
    custom_metadata=metrics,
    notes=metrics,
    checked=st.booleans(),
    latest=st.booleans(),
    best=st.booleans(),
)
remain_rows = st.builds(LeftoverRow, names, names, sizes, floats, few(st.integers(0, 99)), names)
overviews = st.builds(
    Overview,
    directory=names,
    epochs=few(epoch_rows, 3),
    hidden=st.integers(0, 10**6),
    hidden_nbytes=sizes,
    leftovers=few(remain_rows),
    metric=names,
    mode=st.sampled_from(["max", "min"]),
    problems=st.dictionaries(names, names, max_size=2),
)
shardings = st.builds(ShardingRow, few(st.integers(0, 5)), few(names, 8), st.integers(0, 9), names) | st.lists(
    st.integers(1, 4), max_size=3
).flatmap(
    lambda counts: st.builds(
        ShardingRow,
        st.just(tuple(counts)),
        st.lists(names, min_size=math.prod(counts), max_size=math.prod(counts)).map(tuple),
        st.integers(0, 9),
        names,
    )
)
leaf_rows = st.builds(
    LeafRow,
    name=names,
    path=few(names, 4),
    kind=names,
    dtype=names,
    shape=few(st.integers(0, 10**6)),
    nbytes=sizes,
    value=names,
    sharding=st.none() | shardings,
)
plain_items = st.builds(
    ItemRow,
    name=names,
    kind=st.sampled_from(["arrays", "files", "node"]),
    handler=names,
    leaves=few(leaf_rows, 6),
    files=few(st.builds(FileRow, names, names, sizes)),
    custom_metadata=values,
    problem=names,
)
items = plain_items | st.builds(dataclasses.replace, plain_items, nodes=st.dictionaries(names, plain_items, max_size=2))
details = st.builds(
    EpochDetail,
    epoch_rows,
    few(items, 3),
    st.none() | st.dictionaries(names, st.dictionaries(names, names, max_size=2), max_size=2),
)
bins = st.lists(st.integers(0, 99), max_size=6)
leaf_stats = st.builds(
    LeafStats,
    *(names, names, leaf_rows, sizes, st.integers(0, 3), st.integers(0, 3), sizes),
    *(maybe, maybe, maybe, maybe, floats),
    edges=few(st.floats(-10, 10), 7),
    histogram=bins.map(tuple),
)
KINDS = [rows.ADDED, rows.REMOVED, rows.RESHAPED, rows.RETYPED, rows.CHANGED, rows.UNCHANGED]
diff_rows = st.builds(
    DiffRow,
    *(names, names, names, st.sampled_from(KINDS), st.none() | leaf_rows, st.none() | leaf_rows),
    *(maybe, maybe, maybe, st.none() | sizes, names),
)
diffs = st.builds(Diff, names, sizes, sizes, few(diff_rows, 6), names)

VIEWS = {
    "overview": (overviews, views.overview),
    "epoch": (details, views.epoch),
    "item": (items, lambda found: views.item(found, 10**6)),
    "stats": (st.lists(leaf_stats, max_size=4), leaf_views.stats),
    "diff": (diffs, leaf_views.diff),
    "look": (
        st.builds(rows.ArrayLook, leaf_stats, few(few(st.floats(), 3), 3)),
        leaf_views.look,
    ),
}
KNOWN = {"", "epochckpt", "orbax", "max", "min", "arrays", "files", "node", *NODE_STATES, *STATES, *KINDS}


def tame(found: object, known: dict[str, str]) -> object:
    """The same rows with every text replaced by a harmless one; equal texts stay equal."""
    if isinstance(found, str):
        return found if found in KNOWN else known.setdefault(found, f"t{len(known)}")
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        own = {f.name: tame(getattr(found, f.name), known) for f in dataclasses.fields(found)}
        return dataclasses.replace(found, **own)
    if isinstance(found, Mapping):
        return {tame(key, known): tame(value, known) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)(tame(each, known) for each in found)
    return found


def skeleton(page: Page) -> list[tuple[str, tuple[str, ...]]]:
    """Elements with the names of their attributes."""
    return [(tag, tuple(attributes)) for tag, attributes in page.starts]


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
# Without shrinking, which takes minutes for rows that deep; what is hostile is drawn from a list anyhow.
@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_no_tag_and_no_attribute_comes_from_the_data(name: str, data: st.DataObject) -> None:
    """Hostile rows give the very elements and attributes that tame ones give; all are balanced, and none has an id."""
    strategy, view = VIEWS[name]
    found = data.draw(strategy)
    page = Page(view(found))
    assert skeleton(page) == skeleton(Page(view(tame(found, {}))))
    assert {tag for tag, _ in page.starts} <= TAGS
    for _, attributes in page.starts:
        for attribute, value in attributes.items():
            if attribute == "class":
                assert all(re.fullmatch(r"eckpt|eckpt-[a-z0-9-]+", each) for each in value.split())
            elif attribute in WORDS:
                assert value.isprintable()
            else:
                assert re.fullmatch(FIXED[attribute], value), (attribute, value)
    assert all(text.isprintable() for text in page.text)
    (style,) = page.styles
    assert "http" not in style


# What people see.


def node(i: int, secs: float | None = 1.0, state: str = rows.COMMITTED, detail: str = "") -> NodeRow:
    return NodeRow(f"process_{i}", 10**6, secs, state, detail)


def titles(page: Page) -> set[str]:
    return {at["title"] for _, at in page.starts if "title" in at}


def epoch_row(number: int, nodes: int | tuple[NodeRow, ...] = 2, **other: object) -> EpochRow:
    some = tuple(node(i, 1.0 + i) for i in range(nodes)) if isinstance(nodes, int) else nodes
    fields: dict = {
        "nodes": some,
        "nbytes": len(some) * 10**6,
        "started_ns": 10**18,
        "committed_ns": 10**18 + 2 * 10**9,
        "blocked_secs": 0.012,
        "checked": True,
    }
    return EpochRow(number, **({"state": rows.COMMITTED} | fields | other))  # type: ignore[arg-type]


def array(path: Sequence[str], sharding: ShardingRow | None = None, nbytes: int = 4096) -> LeafRow:
    return LeafRow("/".join(path), tuple(path), "jax", "float32", (1024,), nbytes, "", sharding)


def arrays(leaves: Sequence[LeafRow]) -> ItemRow:
    return ItemRow("default", "arrays", "", tuple(leaves))


def test_every_state_is_a_word_with_a_tone_and_an_explanation() -> None:
    """People who cannot tell red from green read it."""
    states = [rows.COMMITTED, rows.DAMAGED, rows.IN_PROGRESS, rows.ABANDONED]
    found = tuple(epoch_row(i, state=state) for i, state in enumerate(states))
    page = Page(views.overview(Overview("d", found)))
    assert all(word in page.words for word in ("✓", *states[1:]))
    tones = [{at["class"] for _, at in page.of_class(tone)} for tone in ("good", "bad", "live", "warn")]
    assert all(tones)
    assert "every node finished; it can be restored" in titles(page)


def test_an_overview_tells_what_one_asks_first() -> None:
    """How many, how big, the latest, the best and why, who is slow, what is damaged and why, what is hidden."""
    found = Overview(
        "/runs/a",
        (
            epoch_row(3, best=True, metrics={"accuracy": 0.91234567}, sources={"accuracy": "evaluator"}),
            epoch_row(4, state=rows.DAMAGED, detail="process_1: 12 bytes are missing"),
            epoch_row(5, latest=True, nodes=(node(0), node(1, 9.0), node(2))),
        ),
        hidden=7,
        hidden_nbytes=2 * 10**9,
        leftovers=(LeftoverRow("x.tmp", "attempt", 10**6, 60.0, (6,)),),
        metric="accuracy",
        problems={"/runs/a/9": "permission denied"},
    )
    page = Page(views.overview(found))
    for words in (
        "10 epochs, 2.0 GB",  # as `len` counts them
        "latest 5",
        "best 3 by max accuracy: 0.9123",
        "1 damaged",
        "process_1: 12 bytes are missing",
        "saved in 2 s, training blocked",
        "7 older epochs (2.0 GB) are not shown",
        "Also here, and part of no epoch: 1 thing, 1.0 MB",
        "/runs/a/9: permission denied",
    ):
        assert words in page.words
    assert {"process_1 · 1.0 MB · 2 s", "0.9123, attached by evaluator"} <= titles(page)
    slow = [at["title"] for tag, at in page.of_class("warn") if tag == "i"]
    assert slow == ["process_1 · 1.0 MB · 9 s"]
    assert "process_1 9 s" in page.words


def test_a_damaged_node_and_nodes_that_write_differ_in_more_than_colour() -> None:
    """The damaged one is hatched, and the tip of each says the word."""
    nodes = (node(0, None, "written"), node(1, None, "writing"), node(2, 1.0, rows.DAMAGED, "gone"))
    row = dataclasses.replace(epoch_row(1), nodes=nodes)
    page = Page(views.overview(Overview("d", (row,))))
    assert [at["title"] for tag, at in page.of_class("bad") if tag == "i"] == [
        "process_2 · 1.0 MB · 1 s · damaged · gone"
    ]
    assert {"process_0 · 1.0 MB · written", "process_1 · 1.0 MB · writing"} <= titles(page)


@pytest.mark.slow
def test_five_hundred_epochs_of_64_nodes_are_bounded_and_mostly_folded() -> None:
    """The newest are seen, older ones are one click away, and the page stays below a megabyte."""
    found = Overview("d", tuple(epoch_row(i, 64, best=i == 3) for i in range(500)))
    view = html_views.page(views.overview(found))
    assert len(view) < 10**6
    newest, older = view.split("<details", 1)
    first = r'eckpt-row"><td class="eckpt-right"><span class="eckpt-strong">(\d+)<'
    assert re.findall(first, newest) == [str(i) for i in range(499, 479, -1)]
    assert len(re.findall(first, older)) == 480
    assert "… 480 more" in older


@pytest.mark.slow
def test_ten_thousand_nodes_are_a_strip_of_64() -> None:
    """Bars then stand for groups, and a damaged node is seen in its group."""
    nodes = tuple(node(i, 1.0, rows.DAMAGED if i == 7777 else rows.COMMITTED) for i in range(10_000))
    page = Page(views.overview(Overview("d", (epoch_row(1), dataclasses.replace(epoch_row(2), nodes=nodes)))))
    cells = [at for tag, at in page.starts if tag == "i" and "title" in at]
    assert len(cells) <= 2 * 64
    (bad,) = [at["title"] for at in cells if at.get("class") == "eckpt-bad"]
    first, last, damaged = map(int, re.findall(r"process_(\d+)", bad))
    assert first <= damaged == 7777 <= last


def test_metrics_in_metrics_have_the_names_that_they_are_asked_by() -> None:
    """`eval/accuracy` is a column, is what is best, and is a fact of its epoch: as in the text view."""
    row = epoch_row(3, best=True, latest=True, metrics={"eval": {"accuracy": 0.75}})
    words = Page(views.overview(Overview("/runs/a", (row,), metric="eval/accuracy"))).words
    assert "best 3 by max eval/accuracy: 0.75" in words
    assert "{" not in words
    assert "eval/accuracy 0.75" in Page(views.epoch(EpochDetail(row, ()))).words


def test_an_empty_directory_says_so() -> None:
    """No table without rows."""
    page = Page(views.overview(Overview("d", ())))
    assert "no epochs" in page.words
    assert not [tag for tag, _ in page.starts if tag == "table"]


def listed(page: Page) -> tuple[int, int]:
    """Leaves that a view lists, and those that it only counts."""
    counted = [int(n.replace(",", "")) for n in re.findall(r"… [\d,]+ more ([\d,]+) lea(?:f|ves)", page.words)]
    return len(page.of_class("leaf")) - len(counted), sum(counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        lambda i: (f"block_{i // 100}", f"w{i % 100}"),
        lambda i: (f"w{i}",),
        lambda i: (f"b{i}", "kernel"),
        lambda i: tuple(f"{digit}" for digit in f"{i:05}"),
        lambda i: ("a" * 200 + f"{i // 10}", '"<&>' * 100, f"{i}"),
        lambda i: ("deep",) * (i % 500) + (str(i),),
    ],
    ids=["folders", "flat", "pairs", "digits", "long names", "deep"],
)
def test_a_tree_of_20000_leaves_is_bounded_and_every_leaf_is_counted(path: object) -> None:
    """Below a megabyte whatever its form; what is listed and what is counted are all of it; mostly folded."""
    sharding = ShardingRow((64,), tuple(f"process_{i}" for i in range(64)))
    leaves = [array(path(i), sharding) for i in range(20_000)]  # type: ignore[operator]
    view = html_views.page(views.epoch(EpochDetail(epoch_row(1, 64), (arrays(leaves),))))
    assert len(view) < 10**6
    page = Page(view)
    seen, counted = listed(page)
    assert seen + counted == 20_000
    assert seen >= 20


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=60))
def test_every_leaf_is_listed_when_there_are_few(paths: list[list[str]]) -> None:
    """Whatever the keys, equal ones included: no leaf gets lost in folders that were merged."""
    page = Page(views.item(arrays([array(path) for path in paths]), 10**6))
    assert listed(page) == (len(paths), 0)
    named = [
        name.get("title") for (_, at), (_, name) in itertools.pairwise(page.starts) if at.get("class") == "eckpt-leaf"
    ]
    assert Counter(named) == Counter("/".join(path) for path in paths)


def test_folders_sum_up_and_single_children_are_joined() -> None:
    """Counts, bytes and shares of all below; `a/b` where `a` holds nothing else."""
    leaves = [array(("params", "a", "b", "w")), array(("params", "a", "b", "v"), nbytes=12_288), array(("opt", "only"))]
    words = Page(views.item(arrays(leaves), 40_960)).words
    assert "params/a/b 2 leaves 2,048 elements 16.4 kB 40%" in words
    assert "opt/only float32 1024 4.1 kB 10%" in words


def test_small_trees_are_open_and_large_ones_folded() -> None:
    """What fits a screen is seen at once."""

    def opened(n: int) -> int:
        leaves = [array((f"layer_{i // 4}", f"w{i % 4}")) for i in range(n)]
        page = Page(views.item(arrays(leaves), 10**6))
        return sum("open" in at for tag, at in page.starts if tag == "details") - 1  # the item's own

    assert (opened(16), opened(400)) == (4, 0)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda counts: math.prod(counts) > 1),
    st.integers(1, 12),
    st.integers(0, 20),
)
def test_the_index_ranges_of_all_nodes_cover_the_array(counts: list[int], nodes: int, turn: int) -> None:
    """Each part is listed once, with the node that wrote it; of many parts of one node, the first four."""
    owners = tuple(f"process_{(i + turn) % nodes}" for i in range(math.prod(counts)))
    shape = tuple(3 * count for count in counts)
    leaf = dataclasses.replace(array(("w",), ShardingRow(tuple(counts), owners)), shape=shape)
    words = Page(views.item(arrays([leaf]), 10**6)).words
    assert "How its arrays are cut over nodes" in words
    tail = words.partition("index ranges ")[2]
    listed = re.findall(r"(process_\d+) (\d+) ((?:\[[\d:, ]+\] ?)+)(…)?", tail)
    assert {name: int(count) for name, count, *_ in listed} == Counter(owners)
    written = np.zeros(shape, int)
    for name, count, ranges, more in listed:
        boxes = [
            tuple(slice(*map(int, side.split(":"))) for side in box.split(", "))
            for box in re.findall(r"\[([^]]+)\]", ranges)
        ]
        assert len(boxes) == min(int(count), 4)
        assert bool(more) == (int(count) > 4)
        for box in boxes:
            written[box] += 1
            cell = np.ravel_multi_index([side.start // 3 for side in box], counts)
            assert owners[cell] == name
    assert written.max() == 1
    assert written.all() or any(more for *_, more in listed)


def test_many_parts_are_summed_up_in_words() -> None:
    """A list of 100,000 ranges would tell nothing and cost much."""
    sharding = ShardingRow((1000, 100), tuple(f"process_{i % 64}" for i in range(100_000)), 3)
    leaf = dataclasses.replace(array(("w",), sharding), shape=(1000, 100))
    page = Page(views.item(arrays([leaf]), 10**6))
    assert "1000×100 parts on 64 nodes, 3 copies" in page.words
    assert "… 32 more nodes" in page.words
    assert len(page.of_class("row")) == 32


def test_views_on_one_page_do_not_disturb_one_another() -> None:
    """The same rules in each; no element has an id."""
    leaves = [array(("w",), ShardingRow((n,), tuple(f"process_{i}" for i in range(n)))) for n in (2, 3)]
    pages = [Page(views.item(arrays([leaf]), 1)) for leaf in leaves]
    assert [page.styles for page in pages] == [[html_style.css()]] * 2
    assert not [at for page in pages for _, at in page.starts if "id" in at]


def stats_of(name: str, **other: object) -> LeafStats:
    fields: dict = {"count": 100, "nans": 0, "infs": 0, "zeros": 0, "min": -1.0, "max": 1.0, "mean": 0.0, "std": 0.5}
    fields |= {"norm": 3.0, "edges": (-1.0, 0.0, 0.5, 1.0), "histogram": (5, 0, 10), **other}
    return LeafStats("default", "", array((name,)), **fields)


def test_statistics_show_what_is_not_finite_first_of_all() -> None:
    """NaN and Inf are named above the table, and have columns in it; of many arrays, those come first."""
    found = [stats_of("good"), stats_of("bad", nans=12), stats_of("worse", infs=3)]
    page = Page(leaf_views.stats(found))
    assert "NaN or Inf in 2: bad, worse" in page.words
    assert "NaN inf histogram" in page.words
    assert "12" in page.words
    assert "no NaN, no Inf" in Page(leaf_views.stats(found[:1])).words
    many = [stats_of(f"w{i}") for i in range(300)] + [stats_of("bad", nans=1)]
    assert "bad" in titles(Page(leaf_views.stats(many)))


def test_a_histogram_has_a_bar_for_each_bin() -> None:
    """As high as the bin is full, from left to right; a bin of one element is not empty."""
    found = stats_of("w", edges=tuple(map(float, range(5))), histogram=(500, 0, 1000, 1))
    page = Page(leaf_views.stats([found]))
    bars = [(at["style"], at["title"]) for tag, at in page.starts if tag == "i"]
    assert bars == [
        ("height:50%", "500 from 0 to 1"),
        ("height:0%", "0 from 1 to 2"),
        ("height:100%", "1,000 from 2 to 3"),
        ("height:10%", "1 from 3 to 4"),
    ]
    assert "0 to 4" in titles(page)


def test_every_array_that_is_listed_has_its_histogram() -> None:
    """The page of many arrays ends earlier, and says so, but leaves no histogram out."""
    edges, counts = tuple(map(float, range(21))), tuple(range(20))
    page = Page(leaf_views.stats([stats_of(f"w{i}", edges=edges, histogram=counts) for i in range(900)]))
    rows = len(page.of_class("row"))
    assert rows > 250
    assert len(page.of_class("strip")) == rows
    assert f"… {900 - rows} more" in page.words


def test_a_difference_shows_what_changed_most_first() -> None:
    """Counts of each kind, then the changed ones by relative norm; what was 0 before counts as most."""
    leaf = array(("w",))
    norms = {
        "small": (0.1, 0.001),
        "large": (9.0, 0.5),
        "from zero": (1.0, None),
        "nan": (2.0, math.nan),
        "to nan": (0.0, None),
    }
    found = [DiffRow("default", "", k, rows.CHANGED, leaf, leaf, n, r, 0.1, 5) for k, (n, r) in norms.items()]
    found += [
        DiffRow("default", "", "same", rows.UNCHANGED, leaf, leaf),
        DiffRow("a", "", "new", rows.ADDED, None, leaf),
    ]
    found.append(DiffRow("a", "", "h", rows.RETYPED, leaf, dataclasses.replace(leaf, dtype="bfloat16")))
    page = Page(leaf_views.diff(Diff("/d", 3, 7, tuple(found), "/e")))
    order = [
        at["title"] for tag, at in page.starts if tag == "td" and "title" in at and at["title"] in {*norms, "new", "h"}
    ]
    assert order == ["new", "h", "from zero", "nan", "to nan", "large", "small"]
    for words in ("5 changed", "1 added", "1 unchanged", "/d epoch 3 → /e epoch 7", "from 0", "float32 → bfloat16"):
        assert words in page.words
    nothing = Diff("/d", 3, 7, (found[5],))
    assert "nothing changed" in Page(leaf_views.diff(nothing)).words


@pytest.mark.long
def test_large_statistics_and_differences_are_bounded() -> None:
    """Below a megabyte for 20,000 leaves, and what is left out is counted."""
    leaf = array(("params", "a" * 300))
    edges, counts = tuple(float(i) for i in range(51)), tuple(range(1, 51))
    stats = html_views.page(leaf_views.stats([stats_of("w", edges=edges, histogram=counts)] * 20_000))
    kinds = itertools.cycle(KINDS)
    names = ("".join(letters) * 125 for letters in itertools.product(string.ascii_letters, repeat=4))
    rows = ("i", "n"), (leaf, leaf, 1.0, 0.5, 0.1, 3)
    changes = tuple(DiffRow(*rows[0], name, next(kinds), *rows[1]) for name in itertools.islice(names, 20_000))
    diff = html_views.page(leaf_views.diff(Diff("d", 1, 2, changes)))
    assert max(len(stats), len(diff)) < 10**6
    page = Page(stats)
    more = re.search(r"… ([\d,]+) more$", page.words)
    assert more is not None
    assert int(more[1].replace(",", "")) + len(page.of_class("row")) == 20_000
    assert "… 16,467 more leaves" in Page(diff).words


def test_views_of_a_real_directory(tmp_path: pathlib.Path) -> None:
    """What a manager wrote, and what became of it, is what a notebook shows."""
    with epochckpt.CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            tree = {"params": {"kernel": np.full((4, 2), number, np.float32)}, "name": "<b>bold</b>"}
            manager.save(number, args=ocp.args.StandardSave(tree), metrics={"loss": 1 / number})
    (data,) = (tmp_path / "1").glob("*/default.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    found = epochckpt.inspect(tmp_path, metric="loss", mode="min")
    words = Page(found._repr_html_()).words
    assert "best 2 by min loss: 0.5" in words
    assert "1 damaged" in words
    assert "default.safetensors" in words
    shown = Page(found[2]._repr_html_()).words
    assert "params/kernel float32 4×2" in shown
    assert "'<b>bold</b>'" in shown
    assert "all 2" in Page(found[2].stats("params/*")._repr_html_()).words


# The style.


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# (text, background): the pairs that the rules put together.
TEXT_ON = [
    *((text, on) for text in ("fg", "faint", "good", "bad", "live", "warn") for on in ("bg", "soft")),
    ("fg", "bad-bg"),
]


@pytest.mark.parametrize("theme", [html_style.LIGHT, html_style.DARK], ids=["light", "dark"])
def test_text_can_be_read_in_both_themes(theme: dict[str, str]) -> None:
    """At least 4.5:1 for each text on each background that it is put on; bars stand out from the ground."""
    found = {(text, on): contrast(theme[text], theme[on]) for text, on in TEXT_ON}
    assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}
    assert contrast(theme["bar"], theme["track"]) >= 1.5


def test_every_rule_stays_inside_the_view_and_outweighs_the_notebooks() -> None:
    """Selectors begin at the root, named twice; classes, variables and colours are our own; nothing is fetched."""
    sheet = html_style.css()
    flat = re.sub(r"@media[^{]*\{(.*?\})\}", r"\1", sheet)
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", flat)
    assert len(rules) > 50
    for selectors, body in rules:
        for selector in re.split(r",(?![^(]*\))", selectors):
            root = r"(?:(?:html|body)[\w.:()\[\]=\"-]* )?\.eckpt\.eckpt"
            assert re.match(rf"{root}(?: |$)", selector.strip()), selector
            after = selector.split(".eckpt.eckpt", 1)[1]
            assert all(name.startswith("eckpt-") for name in re.findall(r"\.([a-z][\w-]*)", after))
        assert "$" not in body
        assert "url(" not in body
    assert "@import" not in sheet
    used = set(re.findall(r"var\(--eckpt-([a-z-]+)\)", sheet))
    assert used <= set(html_style.LIGHT)
    assert set(html_style.LIGHT) == set(html_style.DARK)


def test_every_class_in_a_view_has_a_rule() -> None:
    """A name that was misspelled would show as nothing."""
    sheet = html_style.css()
    sharding = ShardingRow((2, 2), ("process_0", "process_1", "process_0", ""))
    detail = EpochDetail(
        epoch_row(1, 12, latest=True, best=True), (arrays([array(("w",), sharding)]),), {"i": {"l": "w"}}
    )
    leaf = array(("w",))
    shown = [
        views.overview(Overview("d", (epoch_row(1, state=rows.DAMAGED, detail="d"), epoch_row(2)))),
        views.epoch(detail),
        leaf_views.stats([stats_of("w", nans=1)]),
        leaf_views.diff(Diff("d", 1, 2, tuple(DiffRow("i", "n", "w", kind, leaf, leaf, 1.0, 1.0) for kind in KINDS))),
    ]
    used = {name for view in shown for _, at in Page(view).starts for name in at.get("class", "").split()}
    unstyled = {name for name in used if f".{name}" not in sheet}
    assert unstyled == set()
