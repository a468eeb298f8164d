"""Many small epochs: saves in a row, and how long it takes to open a directory of thousands.

"a save" is one of `--saves` saves of 1 MB in a row, each begun as soon as `save()` lets it; stock Orbax makes only
`--orbax_saves`, since its time for one does not fall with their number. "one file" is the limit: each is one file of
that size, made durable and then renamed, durable as well.

A directory is opened when `latest_step()` has answered, by stock Orbax in at most 3 rounds. Its directory is made of
links to the files of one of its epochs. "listing" is `os.listdir` alone, "records" also asks whether each folder has a
record. ext4 is slow for minutes where thousands of files were deleted: see README.md.

    python benchmarks/many_epochs.py --saves=1000 --epochs=2000,10000
"""

import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import orbax.checkpoint as ocp
from absl import app, flags

SAVES = flags.DEFINE_integer("saves", 1000, "Saves in a row.")
ORBAX_SAVES = flags.DEFINE_integer("orbax_saves", 200, "The same, of stock Orbax.")
EPOCHS = flags.DEFINE_list("epochs", ["2000", "10000"], "Epochs in the directories that are opened.")


def makers() -> dict[str, Callable[[pathlib.Path], Any]]:
    return common.defaults()


def saves_in_a_row(base: pathlib.Path) -> dict[str, common.Times]:
    state, found = common.state_of("1x1MB"), {}
    for name, make in makers().items():
        count = SAVES.value if name == "epochckpt" else min(SAVES.value, ORBAX_SAVES.value)
        with make(base / name) as manager:
            manager.save(0, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()
            began = time.perf_counter()
            for epoch in range(1, count + 1):
                manager.save(epoch, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()
            found[name] = {"a save": (time.perf_counter() - began) / count}
        shutil.rmtree(base / name)
    memory, folder = common.aligned(common.nbytes_of(state)), base / "files"
    folder.mkdir()
    began = time.perf_counter()
    for number in range(SAVES.value):
        common.write_raw(memory, folder / "new", direct=False)
        (folder / "new").rename(folder / str(number))
        common.sync_folder(folder)
    found["one file"] = {"a save": (time.perf_counter() - began) / SAVES.value}
    return found


def opening(base: pathlib.Path, count: int) -> dict[str, common.Times]:
    opens = makers()
    state, times = common.state_of("1x4B"), {name: list[float]() for name in [*opens, "listing", "records"]}
    for name, make in opens.items():
        with make(base / name) as manager:
            for epoch in range(count if name == "epochckpt" else 1):
                manager.save(epoch, args=ocp.args.PyTreeSave(state))
        for epoch in range(1, count) if name != "epochckpt" else ():
            shutil.copytree(base / name / "0", base / name / str(epoch), copy_function=os.link)
    for number in range(common.ROUNDS.value + 1):
        for name, found in times.items():
            if name == "orbax" and len(found) == 3:
                continue
            began = time.perf_counter()
            manager: Any = None
            if name in opens:
                manager = opens[name](base / name)
                assert manager.latest_step() == count - 1
            else:
                names = os.listdir(base / "epochckpt")
                assert len(names) >= count
                if name == "records":
                    assert sum(os.path.exists(f"{base}/epochckpt/{each}/epoch.json") for each in names) == count
            if number:
                found.append(time.perf_counter() - began)
            if manager is not None:
                manager.close()
    return {name: {"open": statistics.median(found)} for name, found in times.items()}


def main(_: list[str]) -> None:
    results: dict[str, Any] = {}
    with common.scratch() as base:
        results["saves"] = saves_in_a_row(base)
        common.show(f"{SAVES.value} saves of 1 MB in a row", results["saves"])
    for count in map(int, EPOCHS.value):
        with common.scratch() as base:
            results[f"open {count}"] = opening(base, count)
            common.show(f"a directory of {count} epochs", results[f"open {count}"])
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
