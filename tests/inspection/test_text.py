"""Text views: every row is legible in any width, nothing in a row does anything to a terminal, large trees fold."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from rich.cells import cell_len

from epochckpt.inspection import html as html_views
from epochckpt.inspection import leaf_views, tree, views
from epochckpt.inspection import text as text_views
from epochckpt.inspection.blocks import Block
from epochckpt.inspection.rows import (
    ABANDONED,
    ADDED,
    CHANGED,
    COMMITTED,
    DAMAGED,
    IN_PROGRESS,
    REMOVED,
    RESHAPED,
    RETYPED,
    UNCHANGED,
    ArrayLook,
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

HOSTILE = "\x1b[31mred\x1b]0;title\x07\nline\r\u202ebidi\x9b2J[bold]not markup[/bold] :smile: \ud800" + "x" * 10_000
WIDTHS = (20, 40, 80, 200)
SEQUENCES = re.compile(r"\x1b\[[0-9;]*m")


def epoch_row(epoch: int, nodes: int = 1, slow: int = 0, **given: Any) -> EpochRow:
    written = tuple(NodeRow(f"process_{i}", 10_000_000, 3.0 if i == slow else 1.0) for i in range(nodes))
    facts: dict[str, Any] = {
        "state": COMMITTED,
        "nodes": written,
        "nbytes": sum(node.nbytes for node in written),
        "started_ns": 10**18,
        "committed_ns": 10**18 + 2 * 10**9,
        "blocked_secs": 0.012,
        "metrics": {"loss": 1 / (epoch + 1), "eval/accuracy": 0.5},
        "folder": str(epoch),
        "save_id": f"ab-{epoch}",
    }
    return EpochRow(epoch, **(facts | given))


def leaf(name: str, shape: tuple[int, ...] = (4, 8), dtype: str = "float32", **given: Any) -> LeafRow:
    size = 4
    for n in shape:
        size *= n
    return LeafRow(name, tuple(name.split("/")), "jax", dtype, shape, size, **given)


def item(leaves: Sequence[LeafRow]) -> ItemRow:
    return ItemRow("default", "arrays", "StandardCheckpointHandler", tuple(leaves))


def stats(one: LeafRow, **given: Any) -> LeafStats:
    known: dict[str, Any] = {"count": 32, "nans": 0, "infs": 0, "zeros": 0, "min": -1.0, "max": 2.0, "mean": 0.5}
    known |= {"std": 0.1, "norm": 4.0, "edges": (0.0, 1.0, 2.0, 3.0), "histogram": (1, 0, 8)}
    return LeafStats("default", "", one, **(known | given))


def text_of(view: Sequence[Block], width: int, colour: bool = False, **options: Any) -> str:
    return text_views.to_text(text_views.render(view, **options), width, colour)


def everything(text: str) -> dict[str, Sequence[Block]]:
    """Each view of rows that have a text wherever rows have text."""
    one = LeafRow(text, (text, text), text, text, (2,), 8, text, ShardingRow((2,), (text, f"{text}2"), 2, text))
    value = LeafRow(text, (text,), text, value=text)
    node = NodeRow(text, 8, 1.0, DAMAGED, text)
    row = EpochRow(
        3, DAMAGED, text, text, text, text, (node, NodeRow(text * 2, 8, 2.0)), 8, 10**18, 10**18, 0.1,
        metrics={text: 1.0, f"{text}2": text}, sources={text: text}, custom_metadata={text: text}, notes={text: text},
    )  # fmt: skip
    own = ItemRow(text, "node", text, nodes={text: ItemRow(text, "arrays", leaves=(one,))}, custom_metadata=text)
    files = ItemRow(text, "files", text, files=(FileRow(text, text, 8),), problem=text)
    arrays = ItemRow(text, "arrays", text, (one, value))
    seen = Overview(
        text, (row,), 1, 8, (LeftoverRow(text, text, 8, None, (1,), text),), text, "max", {text: text, "": text}
    )
    rows = [DiffRow(text, text, text, change, one, value, 1.0, 1.0, 1.0, 1, text) for change in (ADDED, CHANGED)]
    return {
        "overview": views.overview(seen),
        "epoch": views.epoch(EpochDetail(row, (own, files, arrays), {text: {text: text}})),
        "item": views.item(arrays, 8),
        "stats": leaf_views.stats([dataclasses.replace(stats(one), item=text, node=text)]),
        "look": leaf_views.look(ArrayLook(dataclasses.replace(stats(one), node=text), ((math.nan, *[-0.5] * 47),) * 3)),
        "diff": leaf_views.diff(Diff(text, 1, 2, tuple(rows), text)),
    }


@pytest.mark.parametrize("view", ["overview", "epoch", "item", "stats", "look", "diff"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_in_a_row_does_anything_to_a_terminal(view: str, width: int) -> None:
    """Control and format characters come out as text, markup and emoji codes are not read, whatever is 10 kB long."""
    shown = text_of(everything(HOSTILE)[view], width, colour=True, owners=True)
    assert SEQUENCES.search(shown)
    plain = SEQUENCES.sub("", shown)
    assert all(char.isprintable() or char == "\n" for char in plain)
    assert len(plain) < 20_000  # rows have it twenty times
    if width == 200:
        assert "\\x1b" in plain
    assert everything(HOSTILE).keys() == everything("a").keys()


def test_markup_and_emoji_codes_are_shown_as_they_are() -> None:
    """Square brackets in a name are brackets."""
    shown = text_of(views.item(item([leaf("[bold]w[/bold]:smile:")]), 1), 100)
    assert "[bold]w[" in shown
    assert ":smile:" in shown


@pytest.mark.slow
@pytest.mark.parametrize("view", ["overview", "epoch", "item", "stats", "look", "diff"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(view: str, width: int) -> None:
    """Also of names with characters that are two columns wide."""
    for name in ("a" * 300, "漢字" * 100):
        lines = lines_of(everything(name)[view], width, owners=True)
        assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("view", ["overview", "epoch", "item", "stats", "look", "diff"])
def test_without_colour_there_are_no_escape_sequences(view: str) -> None:
    """Plain text is plain."""
    assert "\x1b" not in text_of(everything("name")[view], 80)


def lines_of(view: Sequence[Block], width: int = 80, **options: Any) -> list[str]:
    return text_of(view, width, **options).splitlines()


def line_with(lines: Sequence[str], start: str) -> str:
    return next(line for line in lines if line.split()[:1] == [start])


def test_the_overview_says_what_there_is() -> None:
    """State, bytes, times, metrics, marks, what is wrong, what is left over, how much is not shown: in 80 columns."""
    rows = [
        epoch_row(7, best=True),
        epoch_row(8, state=DAMAGED, detail="process_0/default.safetensors is missing"),
        epoch_row(9, latest=True),
        EpochRow(10, IN_PROGRESS, detail="0 of 1 nodes", nodes=(NodeRow("process_0", 5_000_000),), nbytes=5_000_000),
        EpochRow(11, ABANDONED, detail="its job was killed", age_secs=7200.0),
    ]
    remains = (
        LeftoverRow("rolled-back-0123456789abcdef", "rolled back", 1_000_000, 90_000.0, (12,), "by rollback_to"),
    )
    seen = Overview("/data/run", tuple(rows), 400, 10**12, remains, "loss", "min", {"13": "Permission denied"})
    lines = lines_of(views.overview(seen, hint="; --limit 0 shows all"))
    assert lines[0] == "/data/run"
    said = (
        "403 epochs, 1.0 TB · 1 damaged · 1 in progress · 1 abandoned · ▸ latest 9 · ★ best 7 by min loss: 0.125 · "
        "10.0 MB each · saved in 2 s, training blocked 12 ms"
    )
    assert " · ".join(line.strip() for line in lines[1:4]).startswith(said)
    assert "… 400 older epochs (1.0 TB) are not shown; --limit 0 shows all" in lines
    assert re.fullmatch(r"7 ★ ✓ \d+ d 0\.125 0\.5", " ".join(line_with(lines, "7").split()))
    assert "damaged" in next(line for line in lines if line.lstrip().startswith("8 "))
    assert line_with(lines, "9").split()[1] == "▸"
    assert line_with(lines, "10").split()[1:] == ["in", "progress", "5.0", "MB"]
    text = "\n".join(lines)
    for said in (
        "1 damaged",
        "is missing",
        "1 thing, 1.0 MB",
        "its job was killed",
        "rolled back",
        "Permission denied",
    ):
        assert said in text


def test_the_signs_of_a_list_are_explained_below_it() -> None:
    """Those that are there, and no others."""

    def legend(*rows: EpochRow) -> str:
        lines = lines_of(views.overview(Overview("/data/run", rows)), 200)
        return lines[-1] if "committed:" in lines[-1] or "a bar" in lines[-1] else ""

    assert legend(epoch_row(1)) == "✓ committed: the epoch can be restored"
    assert "× a damaged node" in legend(epoch_row(1, 4))
    assert "partial: saved in the middle" in legend(epoch_row(1, notes={"partial": True}))
    assert legend(EpochRow(1, DAMAGED, detail="cut")) == ""


@pytest.mark.parametrize("width", [80, 200])
def test_64_nodes_are_a_bar_each_and_the_slowest_stands_out(width: int) -> None:
    """As many nodes share a bar as it takes; the highest of them, or a damaged one, is what is shown."""
    sound, bad = epoch_row(1, 64, slow=17), epoch_row(2, 64, slow=17, state=DAMAGED)
    nodes = [dataclasses.replace(n, state=DAMAGED) if n.name == "process_40" else n for n in bad.nodes]
    rows = (sound, dataclasses.replace(bad, nodes=tuple(nodes)), epoch_row(3, 32))
    lines = lines_of(views.overview(Overview("/data/run", rows)), width)
    strips = [re.search(r"[▁▂▃▄▅▆▇█×·■]{8,}", line) for line in lines]
    first, second, third = (found[0] for found in strips if found)
    share = -(-64 // len(first))
    assert len(first) == 64 if width == 200 else len(first) >= 16
    assert first.count("█") == 1
    assert first.index("█") == 17 // share
    assert second.index("×") == 40 // share
    assert third.count("·") in (32 // share, -(-32 // share))
    assert any("64 nodes" in line for line in lines)
    assert ("process_17 3 s" in "\n".join(lines)) == (width == 200)


def test_columns_that_do_not_fit_are_left_out_and_the_rest_is_whole() -> None:
    """The narrower, the fewer: number and state stay, nothing is wrapped."""
    seen = Overview("/data/run", tuple(epoch_row(i, 4) for i in range(3)))
    shown = [[line.strip() for line in lines_of(views.overview(seen), width)] for width in WIDTHS]
    tables = [lines[next(i for i, line in enumerate(lines) if "age" in line) :][:4] for lines in shown]
    heads = [len(re.split(r"\s{2,}", table[0])) for table in tables]
    assert [table[0].split()[:1] for table in tables] == [["epoch"]] * len(WIDTHS)
    assert [[line.split()[0] for line in table[1:]] for table in tables] == [["0", "1", "2"]] * len(WIDTHS)
    assert heads == sorted(heads)
    assert heads[-1] > heads[0]
    said = "no room for loss, eval/accuracy"
    assert [said in " ".join(lines) for lines in shown] == [True] + [False] * (len(WIDTHS) - 1)


def test_a_curve_is_over_all_epochs() -> None:
    """Also over those that are not listed; beside it stand the extremes and where they are."""
    points = tuple((i, 10.0 - i if i < 8 else 4.0) for i in range(12))
    seen = Overview("/run", (epoch_row(11),), hidden=11, history={"loss": points, "eval/accuracy": ((3, 0.5),)})
    (found,) = (line for line in lines_of(views.overview(seen), 100) if line.startswith("loss"))
    assert found.split() == ["loss", "█▇▆▅▄▃▂▁▂▂▂▂", "10", "4", "3", "at", "7", "10", "at", "0"]
    many = Overview("/run", (epoch_row(11),), history={"loss": tuple((i, i % 7 - 1e308) for i in range(4000))})
    (found,) = (line for line in lines_of(views.overview(many), 100) if line.startswith("loss"))
    assert len(found.split()[1]) == 40


def test_what_most_epochs_have_in_common_is_said_once() -> None:
    """Size and times are in the rows of those that differ."""
    rows = [epoch_row(i) for i in range(5)]
    rows[2] = dataclasses.replace(rows[2], nbytes=7_000_000)
    rows[3] = dataclasses.replace(rows[3], committed_ns=10**18 + 9 * 10**9)
    rows[4] = dataclasses.replace(rows[4], blocked_secs=0.4, notes={"partial": True})
    lines = lines_of(views.overview(Overview("/run", tuple(rows))), 120)
    assert "47.0 MB · 10.0 MB each · saved in 2 s, training blocked 12 ms" in lines[1]
    assert [line_with(lines, str(i)).split()[6:] for i in range(4)] == [[], [], ["7.0", "MB"], ["9", "s"]]
    assert line_with(lines, "4").split()[1] == "partial"
    assert line_with(lines, "4").split()[-2:] == ["400", "ms"]


def test_a_difference_folds_layers_that_are_alike() -> None:
    """The one that changed most stands for them; with a limit of None each has its line."""
    one = leaf("w")
    found = [DiffRow("state", "", f"layers/{i}/w", CHANGED, one, one, 1.0, i / 8, 1.0, 3) for i in range(4)]
    found += [DiffRow("state", "", "emb", CHANGED, one, one, 1.0, 0.25, 1.0, 3)]
    seen = Diff("/run", 1, 2, tuple(found), metrics={"loss": (2.0, 0.5), "who": ("a", None)})
    lines = [" ".join(line.split()) for line in lines_of(leaf_views.diff(seen), 120)]
    assert "5 changed" in lines[1]
    assert "loss 2 0.5 -1.5" in lines
    assert "who a" in lines
    (folded,) = (line for line in lines if "layers/" in line)
    assert folded.startswith("~ layers/3/w 3 like it changed 0.375")
    assert lines.index(folded) < next(i for i, line in enumerate(lines) if line.startswith("~ emb"))
    assert sum("layers/" in line for line in lines_of(leaf_views.diff(seen, listed=None), 120)) == 4


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_difference_says_what_changed_at_every_width(width: int) -> None:
    """With items, long names and folded layers beside it; the signs are explained above."""
    one, two = leaf("w", (4096, 16384)), leaf("w", (4096, 32768))
    rows = [
        DiffRow("optimizer", "", f"decoder/layer_{i}/attention/query/kernel", CHANGED, one, one, 1.0, 0.5, 1.0, 3)
        for i in range(5)
    ]
    rows += [DiffRow("parameters", "", "decoder/embedding/table/kernel", RESHAPED, one, two)]
    rows += [DiffRow("parameters", "", "step", CHANGED, leaf("step", ()), leaf("step", ()), detail="11000 → 12000")]
    lines = lines_of(leaf_views.diff(Diff("/run", 1, 2, tuple(rows))), width)
    assert lines[1] == "≠ 1 reshaped · ~ 6 changed"
    text = "\n".join(lines)
    assert "what" in text
    assert "11000 → 12000" in text
    assert "→ 4096×32768" in text or "…96×32768" in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_is_shortened_in_a_row_of_a_difference_is_below_it(width: int) -> None:
    """Names with their middle, in which they may differ, broken between keys; and all that changed in a file."""
    name = "decoder/transformer_block_with_a_long_name/layer_{}/{}attention/output_projection/kernel"
    changed = "learning_rate 0.0003 → 0.0001; optimizer adam with weight decay → sgd with momentum; warmup 100 → 200"
    before, after = leaf(name.format(0, "")), leaf(name.format(0, "self_"))
    found = Diff(
        "/data/run",
        0,
        1,
        (
            DiffRow("state", "", before.name, REMOVED, before=before),
            DiffRow("state", "", after.name, ADDED, after=after),
            DiffRow("config", "", "metadata", CHANGED, detail=changed),
        ),
    )
    lines = [line.strip() for line in lines_of(views.diff(found), width)]
    whole = "".join(line if line.endswith("/") else f"{line} " for line in lines)
    assert all(part in whole for part in (before.name, after.name))
    assert changed in " ".join(lines)
    assert not any(line.endswith(("transformer", "_")) for line in lines)


def test_long_names_of_metrics_hide_no_metric() -> None:
    """Their heads are shortened before a column is left out, and never a value."""
    metrics = {f"eval/a_metric_with_a_long_name_{i}": 0.1234 + i for i in range(4)}
    rows = tuple(epoch_row(number, metrics=metrics) for number in (1, 2, 3))
    lines = lines_of(views.overview(Overview("/data/run", rows)), 80)
    assert "no room" not in "".join(lines)
    assert all(f"{value:.4g}" in line_with(lines, "1") for value in metrics.values())


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_no_figure_of_a_summary_is_parted_from_its_unit(width: int) -> None:
    """A line ends between two statements, and begins with none of the dots between them."""
    rows = [epoch_row(n, latest=n == 9, best=n == 7) for n in range(10)]
    lines = lines_of(views.overview(Overview("/data/run", tuple(rows), metric="loss", mode="min")), width)
    said = lines[1 : lines.index("")]
    assert all(len(line) <= width and not line.startswith(("·", " ")) for line in said)
    statements = " · ".join(said).split(" · ")
    assert "saved in 2 s, training blocked 12 ms" in statements
    assert "10.0 MB each" in statements


def test_an_epoch_shows_a_tree_once() -> None:
    """Adam's moments, and an average of the parameters, have their names and shapes: they say so, and are folded."""
    params = [leaf(f"{group}/{name}") for group in ("hidden", "out") for name in ("bias", "kernel")]
    moments = [dataclasses.replace(one, name=f"{m}/{one.name}", path=(m, *one.path)) for m in "mn" for one in params]
    items = [ItemRow("ema", "arrays", leaves=tuple(params)), ItemRow("opt", "arrays", leaves=tuple(moments))]
    other = ItemRow("other", "arrays", leaves=(*params[:-1], leaf("out/kernel", (3, 3))))
    detail = EpochDetail(epoch_row(3), (*items, ItemRow("params", "arrays", leaves=tuple(params)), other))
    lines = lines_of(views.epoch(detail))
    assert sum("hidden/" in line for line in lines) == 2  # of `ema` and of `other`, which has another shape
    assert sum("… as in ema" in line for line in lines) == 3
    assert sum("hidden/" in line for line in lines_of(views.epoch(detail), folding=tree.ALL)) == 5


def test_empty_containers_are_no_leaves_and_keys_have_the_shape_of_users() -> None:
    """In counts neither; many elements are rounded."""
    key = LeafRow("key", ("key",), "prng", "key<fry>", (2,), 8)
    empty = LeafRow("opt/1", ("opt", "1"), "node")
    text = text_of(views.item(item([leaf("w", (1200, 1200)), key, empty]), 10**7), 100)
    assert "2 leaves, 1.44 M elements" in text
    assert "opt" not in text
    assert re.search(r"key +key<fry> +scalar", text)


def test_the_metrics_that_were_asked_for_are_shown_in_that_order() -> None:
    """All of them without being cut, and no others."""
    rows = (epoch_row(1, metrics={"loss": 1, "a/very/long/name/of/a/metric": 2, "other": 3}),)
    lines = lines_of(views.overview(Overview("/run", rows, asked=("a/very/long/name/of/a/metric", "loss"))), 80)
    assert next(line for line in lines if "age" in line).split()[2:4] == ["a/very/long/name/of/a/metric", "loss"]


def test_an_attempt_is_measured_against_the_epoch_before() -> None:
    """Its bars are what each node has written of what it wrote last time."""
    begun = tuple(NodeRow(f"process_{i}", 10_000_000 if i < 2 else 1_000_000) for i in range(3))
    rows = (epoch_row(1, 4, latest=True), EpochRow(2, IN_PROGRESS, nodes=begun, nbytes=21_000_000))
    lines = lines_of(views.overview(Overview("/data/run", rows)))
    assert "██▁·" in line_with(lines, "2")


def test_of_many_nodes_with_a_problem_some_are_named() -> None:
    """A page about an item of thousands of nodes stays short."""
    broken = {f"node_{i:02}": ItemRow("own", "arrays", problem="no record") for i in range(40)}
    text = text_of(views.item(ItemRow("own", "node", nodes=broken), 8), 80)
    assert [i for i in range(40) if f"node_{i:02}: no record" in text] == list(range(20))
    assert "20 more" in text


def test_an_epoch_says_all_that_is_known_of_it() -> None:
    """Facts, nodes, items, what stock Orbax lacks, who attached a metric."""
    row = epoch_row(
        4, 64, slow=9, latest=True, sources={"loss": "evaluator"}, custom_metadata={"git": "abc"}, notes={"rng": 3}
    )
    files = ItemRow("config", "files", "JsonCheckpointHandler", files=(FileRow("metadata", "process_0", 33),))
    own = ItemRow("rng", "node", nodes={"process_1": item([leaf("key")])})
    detail = EpochDetail(row, (files, item([leaf("a/b"), leaf("a/c")]), own), {"default": {"a/c": "too long"}})
    text = text_of(views.epoch(detail), 80)
    for said in (
        "epoch 4  committed  ▸ latest",
        "640.0 MB on 64 nodes in 2 s, training blocked 12 ms",
        "epochckpt, attempt ab-4",
        "loss 0.2  (attached by evaluator)",
        "git: abc",
        "rng: 3",
        "item default: a/c: too long",
        "process_9",
        "item config  1 file, 33 B  JsonCheckpointHandler",
        "item default  2 leaves",
        "item rng  1 node with their own",
    ):
        assert said in text, said


def layers(count: int, inner: int = 2) -> list[LeafRow]:
    return [leaf(f"params/layer_{i}/{'wbcdefgh'[k]}", (i + 1, 8)) for i in range(count) for k in range(inner)]


def test_a_tree_has_a_line_per_leaf_and_group() -> None:
    """Type, shape, bytes and share; groups that hold one group only are one line."""
    leaves = [*layers(2), LeafRow("step", ("step",), "int", value="12")]
    lines = lines_of(views.item(item(leaves), sum(one.nbytes for one in leaves)), 100)
    assert [line.split()[:2] for line in lines[2:]] == [
        ["├─", "params/"], ["│", "├─"], ["│", "│"], ["│", "│"], ["│", "└─"], ["│", "├─"], ["│", "└─"], ["└─", "step"]
    ]  # fmt: skip
    assert re.search(r"w +float32 +1×8 +32 B +17%", lines[4])
    assert re.search(r"params/ +4 leaves +48 elements +192 B +100%", lines[2])
    assert re.search(r"step +int +12$", lines[-1])


@pytest.mark.parametrize("width", range(40, 90, 5))
def test_no_number_is_cut(width: int) -> None:
    """A column that has no room for it is left out."""
    leaves = [leaf(f"params/{name}", (1234, 567, 89)) for name in "ab"]
    shown = text_of(views.item(item(leaves), sum(one.nbytes for one in leaves)), width)
    assert shown.count("elements") == shown.count(" 125 M elements")
    assert shown.count("249.1") in (0, 2 * shown.count("249.1 MB") // 2)


@pytest.mark.slow
def test_20000_leaves_are_folded_to_a_screen_with_counts() -> None:
    """What is left out is counted, in leaves and bytes, and nothing takes long."""
    leaves = layers(2500, 8)
    assert len(leaves) == 20_000
    total = sum(one.nbytes for one in leaves)
    start = time.process_time()
    lines = lines_of(views.item(item(leaves), total))
    assert time.process_time() - start < 5  # of this process alone; on an idle machine it takes 0.2 s
    assert len(lines) <= tree.SCREEN + 3
    assert "item default  20,000 leaves" in lines[0]
    assert any("2,488 more" in line and "19,904 leaves" in line for line in lines)


def test_all_of_a_tree_is_shown_if_asked_for() -> None:
    """Every leaf has its line, however many there are and however alike they are."""
    leaves = [leaf(f"params/layer_{i}/w") for i in range(500)]
    shown = text_of(views.item(item(leaves), 1), 80, folding=tree.ALL)
    assert [shown.count(f"layer_{i}/") for i in range(500)] == [1] * 500


@pytest.mark.parametrize(("depth", "expected"), [(1, 1), (2, 4), (3, 10)])
def test_depth_unfolds_so_many_levels(depth: int, expected: int) -> None:
    """One level is the outermost groups; groups that are folded say so."""
    folding = tree.Folding(depth, 40, None, False)
    lines = lines_of(views.item(item(layers(3)), 1), folding=folding)[2:]
    assert len(lines) == expected
    assert sum("/ …" in line for line in lines) == {1: 1, 2: 3, 3: 0}[depth]


def test_groups_that_are_alike_are_shown_once() -> None:
    """Layers of the same leaves, types and shapes: the first, and how many are like it; another one is not."""
    leaves = [leaf(f"layer_{i}/{name}") for i in range(6) for name in ("w", "b")]
    leaves += [leaf("layer_6/w", (9,)), leaf("layer_6/b")]
    lines = lines_of(views.item(item(leaves), 1))[2:]
    assert [line.split()[1] for line in lines if line.startswith("  ├─ layer") or line.startswith("  └─ layer")] == [
        "layer_0/",
        "layer_6/",
    ]
    assert any("… 5 more like layer_0" in line and "10 leaves" in line for line in lines)


def test_owners_are_listed_with_index_ranges() -> None:
    """Of each way of cutting arrays: which node wrote which part of the first array. Only where it is asked for."""
    lies = ShardingRow((2, 3), tuple(f"process_{i}" for i in (3, 4, 5, 3, 10, 11)), 1, "")
    turned = dataclasses.replace(lies, owners=lies.owners[::-1])
    rows = ShardingRow((2,), ("east", ""))
    unknown = ShardingRow((4,))
    leaves = [leaf(name, (4, 6), sharding=each) for name, each in (("w", lies), ("v", turned))]
    leaves += [leaf("x", (10,), sharding=rows), leaf("y", (8,), sharding=unknown)]
    lines = [" ".join(line.split()) for line in lines_of(views.item(item(leaves), 1), 100, owners=True)]
    assert lines[lines.index("How its arrays are cut over nodes") + 1 :] == [
        "2×3 parts on 5 nodes · 2 leaves, such as w",
        "the writers of the parts differ from leaf to leaf; shown are those of the first leaf",
        "node parts index ranges",
        "process_3 2 [0:2, 0:2] [2:4, 0:2]",
        "process_4 1 [0:2, 2:4]",
        "process_5 1 [0:2, 4:6]",
        "process_10 1 [2:4, 2:4]",
        "process_11 1 [2:4, 4:6]",
        "",
        "2 parts on east · x",
        "node parts index ranges",
        "east 1 [0:5]",
        "not known 1 [5:10]",
        "",
        "4 parts · y",
    ]
    assert "cut over" not in text_of(views.item(item(leaves), 1), 100)


def sharded() -> list[LeafRow]:
    mesh = "fsdp=4, tp=2"
    both = ShardingRow((4, 2), ("p0",) * 4 + ("p1",) * 4, 1, "P('fsdp', 'tp')", mesh, tuple((n,) for n in range(8)))
    both = dataclasses.replace(both, holders=tuple((owner,) for owner in both.owners))
    devices, holders = ((0, 2, 4, 6), (1, 3, 5, 7)), (("p0", "p1"),) * 2
    one = ShardingRow((1, 2), ("p0", "p1"), 2, "P(None, 'tp')", mesh, devices, holders)
    other = ShardingRow((2, 1), ("p0", "p0"), 1, "P('x')", "x=2")
    alone = ShardingRow((1, 1), ("p0",), 1, "cpu:0")
    forms = (both, one, other, alone)
    return [leaf(f"params/{name}", (64, 256), sharding=lies) for name, lies in zip("abcd", forms, strict=True)]


@pytest.mark.parametrize("width", [*range(40, 130, 7), 80, 200])
def test_how_arrays_lie_on_devices_is_never_cut(width: int) -> None:
    """The mesh of most arrays is said once; a spec is whole, or its column is said to have no room."""
    text = text_of(views.item(item(sharded()), 1), width)
    assert text.count("fsdp=4, tp=2") == 1
    specs = re.findall(r"P\(.*|cpu:0", text)
    assert specs or "no room for on devices" in text
    assert width < 80 or len(specs) == 4
    assert [spec.split("  ")[0] for spec in specs] in (
        [],
        ["P('fsdp', 'tp')", "P(None, 'tp')", "P('x') on x=2", "cpu:0"],
    )


def test_a_picture_shows_devices_and_the_processes_that_have_them() -> None:
    """Along the dimensions that are cut, with the index ranges of the parts."""
    lines = [" ".join(line.split()) for line in lines_of(views.item(item(sharded()), 1), 100, owners=True)]
    assert lines[lines.index("How its arrays are cut over nodes") + 1 :] == [
        "4×2 parts on 2 nodes · params/a",
        "P('fsdp', 'tp') on fsdp=4, tp=2",
        "dim 0 ↓ dim 1 → 0:128 128:256",
        "0:16 0 on p0 1 on p0",
        "16:32 2 on p0 3 on p0",
        "32:48 4 on p1 5 on p1",
        "48:64 6 on p1 7 on p1",
        "",
        "1×2 parts on 2 nodes, 2 copies · params/b",
        "P(None, 'tp') on fsdp=4, tp=2",
        "dim 1 ↓ devices, nodes",
        "0:128 0, 2, 4, 6 on p0, p1",
        "128:256 1, 3, 5, 7 on p0, p1",
        "",
        "2×1 parts on p0 · params/c",
        "P('x') on x=2",
        "node parts index ranges",
        "p0 2 [0:32, 0:256] [32:64, 0:256]",
    ]
    assert "on cpu:0" in text_of(views.item(item(sharded()[3:]), 1), 100)


def test_many_parts_are_listed_up_to_a_bound() -> None:
    """Of 10,000 parts on 100 nodes, in 20 ways, some are listed, and the others counted."""
    every = [ShardingRow((100, 100), tuple(f"n{i % 100}" for i in range(10_000)), 1, f"spec {n}") for n in range(20)]
    leaves = [leaf(f"w{n}", (100, 200), sharding=lies) for n, lies in enumerate(every)]
    lines = lines_of(views.item(item(leaves), 1), 200, owners=True)
    assert len(lines) < 500
    assert lines[-1].strip() == "… 8 more ways of cutting"
    assert sum(line.strip() == "… 68 more nodes" for line in lines) == 12
    assert any(
        line.split() == ["n7", "100", "[0:1,", "14:16]", "[1:2,", "14:16]", "[2:3,", "14:16]", "[3:4,", "14:16]", "…"]
        for line in lines
    )


def test_names_that_are_too_long_keep_both_ends() -> None:
    """The middle is left out, and the tree's lines stay where they are."""
    long = "begin" + "x" * 300 + "end"
    lines = lines_of(views.item(item([leaf(f"group/{long}"), leaf("group/b")]), 1))
    (line,) = [line for line in lines if "begin" in line]
    assert line.startswith("     ├─ begin") or line.startswith("  │  ├─ begin") or line.startswith("  ├─ begin")
    assert re.search(r"begin.*…x*end +float32", line)


def test_statistics_show_range_and_histogram() -> None:
    """An empty bin is empty, a full one full; NaN and inf are counted only where there are any."""
    lines = lines_of(leaf_views.stats([stats(leaf("a/w")), stats(leaf("a/b"), nans=3, min=None)]))
    assert lines[0] == "2 arrays, 64 elements · NaN or Inf in 1: a/b"
    head, sound, wrong = lines[2:]
    assert head.split()[:4] == ["leaf", "type", "shape", "min"]
    assert "inf" not in head
    assert sound.endswith("▁ █") or sound.endswith("▂ █")
    assert re.search(r"a/b .* – +2 +0\.5", wrong)
    assert " 3 " in wrong


def test_a_histogram_that_is_too_wide_adds_neighbours_up() -> None:
    """Where bins share a bar, all their elements count: as many look alike, however they lie in the bins."""
    counts = (0, 0, *((4, 0) * 4), *((2, 2) * 5))
    found = stats(leaf("w" * 40), histogram=counts, edges=tuple(map(float, range(21))), std=None, norm=1e-9)
    drawn = [
        line[head.index("histogram") :]
        for head, line in (lines_of(leaf_views.stats([found]), w)[-2:] for w in (200, 80))
    ]
    assert drawn == ["  " + "█ " * 4 + "▅" * 10, " " + "█" * 9]


def test_a_difference_counts_and_lists() -> None:
    """What came, went, changed, in words and numbers; what did not change is counted, and listed if asked for."""
    one, two = leaf("w"), leaf("w", (4, 9), "bfloat16")
    rows = (
        DiffRow("default", "", "a", ADDED, None, one),
        DiffRow("default", "", "r", REMOVED, one, None),
        DiffRow("default", "", "s", RESHAPED, one, two),
        DiffRow("default", "", "t", RETYPED, one, two),
        DiffRow("default", "", "c", CHANGED, one, one, 0.5, 0.25, 0.125, 7),
        DiffRow("default", "", "v", CHANGED, one, one, detail="12 → 13"),
        *(DiffRow("default", "", f"same{i}", UNCHANGED, one, one) for i in range(3)),
    )
    found = Diff("/data/run", 3, 4, rows)
    lines = lines_of(leaf_views.diff(found), 120)
    assert lines[0] == "/data/run epoch 3 → 4"
    assert lines[1] == "+ 1 added · − 1 removed · ≠ 1 reshaped · ≠ 1 retyped · ~ 2 changed · = 3 unchanged"
    assert line_with(lines[2:], "+").split() == ["+", "a", "added", "float32", "4×8"]
    assert "4×8 → 4×9" in "\n".join(lines)
    assert "float32 → bfloat16" in "\n".join(lines)
    changed = [line.split() for line in lines if " c " in line]
    assert changed == [["~", "c", "changed", "0.25", "█", "0.5", "0.125", "7"]]
    assert "12 → 13" in "\n".join(lines)
    assert "same1" not in "\n".join(lines)
    assert "same0  2 like it" in text_of(leaf_views.diff(found, unchanged=True), 120)
    cut = lines_of(leaf_views.diff(found, listed=2, hint="; --limit 0"), 120)
    assert cut[-1] == "… 4 more leaves; --limit 0"


@pytest.mark.parametrize("relative", [math.inf, math.nan])
def test_a_change_beyond_measure_has_a_bar(relative: float) -> None:
    """The smallest one: its line looks like those of other changes."""
    one = leaf("w")
    lines = lines_of(leaf_views.diff(Diff("d", 1, 2, (DiffRow("i", "", "w", CHANGED, one, one, 1.0, relative),))), 120)
    assert line_with(lines[2:], "~").split()[4] == "▁"


@pytest.mark.slow
def test_500_epochs_are_a_line_each() -> None:
    """A long run is a long list, and quickly made."""
    seen = Overview("/data/run", tuple(epoch_row(i, 64) for i in range(500)), metric="loss", mode="min")
    lines = lines_of(views.overview(seen))
    assert sum(bool(re.match(r" +\d+ .*✓", line)) for line in lines) == 500


def test_what_is_faint_is_not_what_matters() -> None:
    """Styles end where they are meant to: names of leaves, and words about damage, are as bright as the rest."""
    rows = (epoch_row(1), epoch_row(2, state=DAMAGED))
    shown = text_of(views.overview(Overview("/data/run", rows)), 80, colour=True)
    assert "\x1b[2m · \x1b[0m\x1b[1;38;5;160m1 damaged" in shown
    shown = text_of(views.item(item([leaf("a"), leaf("b")]), 1), 80, colour=True)
    assert "\x1b[2m├─ \x1b[0ma" in shown


def test_the_runners_notes_are_what_a_person_wants_to_know() -> None:
    """Why the run ended, whether it was left in the middle, how long it trained, the state of what stops it."""
    notes = {
        "version": 1, "nodes": ["process_0"], "partial": True, "finished": ["max_epochs(6)"], "metrics": {"loss": 0.5},
        "stop": {"no_improvement('loss', 5)": {"best": 1 / 3, "count": 2}}, "total_secs": 7200.0, "blobs": {},
        "beside": True,
    }  # fmt: skip
    detail = EpochDetail(dataclasses.replace(epoch_row(6), notes=notes), ())
    page = html.unescape(html_views.page(views.epoch(detail)))
    for view in (text_of(views.epoch(detail), 100), page):
        for said in ("max_epochs(6)", "in the middle", "2 h in all", "no_improvement('loss', 5): best 0.3333, count 2"):
            assert said in view, said
        assert "saved by save_checkpoints()" in view
        for noise in ("version", "blobs", "total_secs", "{"):
            assert noise not in re.sub(r"(?s)<style>.*?</style>", "", view), noise
