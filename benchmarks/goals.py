"""Prints, in Markdown, the table of goals from what `all.py` has measured.

A figure that misses its goal is marked; a dash stands for a missing figure.

    python benchmarks/goals.py measured
"""

import json
import pathlib
import sys
from typing import Any

Figure = tuple[str, float, str, str]
"""Its name, its goal (a lower bound if negative, none if 0), where it is in the JSON, and over what there, if any."""


def ms(case: str, *goals: tuple[str, float]) -> list[Figure]:
    return [(f"{name}, ms", goal / 1e3, f"{case}/epochckpt/{name}", "") for name, goal in goals]


def over(case: str, row: str, *goals: tuple[str, float]) -> list[Figure]:
    """Our figure divided by the figure of another row."""
    return [(f"{name} × {row}", goal, f"{case}/epochckpt/{name}", f"{case}/{row}/{name}") for name, goal in goals]


def ahead(case: str, *goals: tuple[str, float]) -> list[Figure]:
    """Stock Orbax's figure divided by ours."""
    return [(f"{name}: Orbax ×", -goal, f"{case}/orbax/{name}", f"{case}/epochckpt/{name}") for name, goal in goals]


def first(case: str) -> Figure:
    return f"{case} × later ones", 3, f"{case}/epochckpt/first blocked", f"{case}/epochckpt/blocked"


def large(case: str) -> list[Figure]:
    limit = over(case, "device limit", ("save", 1.1), ("first save", 1.1), ("restore", 1.15))
    return [*limit, *over(case, "orbax", ("cpu", 0.5))]


def flat(column: str, goal: float) -> Figure:
    return f"{column} × 1 process", goal, f"8/epochckpt/{column}", f"1/epochckpt/{column}"


def opening(case: str) -> list[Figure]:
    return [*over(case, "listing", ("open", 5)), *over(case, "records", ("open", 0))]


def killed(case: str) -> list[Figure]:
    """The first restore of a new process, over a raw read and over the fastest settings of stock Orbax."""
    column = "after a kill"
    limit = over(case, "device limit", (column, 1.15))
    return [*limit, *(figure for row in ORBAX for figure in over(case, row, (column, 1.0)))]


ORBAX = ("orbax", "orbax uncompressed", "orbax plain files", "orbax zarr3")
COMMITTED, ROW = ("committed", 5), ("a save", 20)
ALL = [(column, 1.0) for column in ("first blocked", "first save", "blocked", "save", "cpu", "restore", "cold")]
SHARED = "8 processes, 0 MB/s/shared/store_bytes"
MEMORY = (("save", 0.05), ("save, donated", 1.05), ("restore", 1.1))
SMALL = ("blocked", "save", "restore")
GOALS: list[tuple[str, str, list[Figure]]] = [  # work, the run of all.py, figures
    ("100 × 10 MB", "large", large("100x10MB")),
    ("401 leaves, 600 MB", "large", [*large("adam401"), *ms("adam401", ("blocked", 8))]),
    ("2,000 × 1 KB", "small", ms("2000x1KB", *zip(SMALL, (5, 30, 60), strict=True))),
    ("the same", "small", ahead("2000x1KB", *zip(SMALL, (50, 75, 30), strict=True))),
    ("5,001 leaves, 60 MB", "small", ms("adam5001", *zip(SMALL, (20, 90, 150), strict=True))),
    ("first save of a tree: blocked", "small", [first("2000x1KB"), first("adam5001")]),
    ("one leaf of 4 bytes", "small", over("1x4B", "orbax", *ALL)),
    *((f"first restore after a kill, {case}", "restart", killed(case)) for case in ("20x10MB", "adam401")),
    ("from exec to the first step", "first_step", over("first step", "limit", ("before the step", 1.1))),
    ("saves of 1 MB in a row", "many_epochs", [*ahead("saves", ROW), *over("saves", "one file", ("a save", 0))]),
    *((f"{int(n):,} epochs", "many_epochs", opening(f"open {n}")) for n in ("2000", "10000")),
    *((f"{n} processes", "processes", [*ahead(n, COMMITTED), *over(n, "disk", ("committed", 0))]) for n in "1248"),
    ("8 processes", "processes", [flat("blocked", 1.5), flat("processor", 0)]),
    ("resharded restore", "reshard", [*over("read", "needed", ("read", 1.1)), *ahead("restore", ("restore", 2))]),
    ("replicated state, 8 processes", "broadcast_restore", [("read × its bytes", 1.01, SHARED, "")]),
    ("memory × the state", "memory", [(name, goal, f"adam401/epochckpt/{name}", "") for name, goal in MEMORY]),
    ("a loop of Python beside a save", "beside_training", ms("Python", ("lost", 190))),
    ("compute beside a save", "beside_training", ms("compute", ("lost", 110))),
    ("restore beside compilation", "beside_compilation", over("first step", "limit", ("ready", 1.1))),
    ("1,000 nodes", "simulate_pod", [("commit beside a busy thread, ms", 2000, "nodes/1000/busy ms", "")]),
    ("1,000 nodes", "simulate_pod", [("blocked × 4 nodes", 1.5, "nodes/1000/again ms", "nodes/4/again ms")]),
]  # fmt: skip


def at(found: Any, place: str) -> float:
    parts = place.rsplit("/", 2)  # the first may have slashes
    return found[parts[0]][parts[1]][parts[2]]


def main(folder: pathlib.Path) -> None:
    print("| work | `all.py --only=` | measured, goal |\n| --- | --- | --- |")
    for work, run, figures in GOALS:
        path, cells = folder / f"{run}.json", list[str]()
        found = json.loads(path.read_text()) if path.exists() else None
        for name, goal, place, below in figures if found else ():
            value = at(found, place) / (at(found, below) if below else 1)
            scale = 1e3 if name.endswith(", ms") and goal < 1 else 1  # seconds in the JSON
            sign, missed = ("≥", value < -goal) if goal < 0 else ("≤", value > goal)
            text = f"{name} {value * scale:.3g}" + (f", {sign} {abs(goal) * scale:g}" if goal else "")
            cells.append(f"**{text}: missed**" if missed and goal else text)
        print(f"| {work} | {run} | {'; '.join(cells) or '–'} |")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
