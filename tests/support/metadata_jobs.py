"""What processes of tests/manager/test_metadata_handlers.py do."""

import os
import sqlite3
import threading

from epochckpt import metadata


def write_many(path: str, prefix: str, count: int, runs: list[str]) -> int:
    """Writes epochs and times, as one of several processes that begin at once."""
    process = os.environ["EPOCHCKPT_TEST_PROCESS_ID"]
    for run in runs:
        handler = metadata.SqliteMetadataHandler(path, run=run.replace("ME", process))
        handler.set_params(prefix, "epochckpt", [f"process_{process}"])
        for epoch in range(count):
            handler.write(epoch)
            handler.report("checkpoint_save", {f"process_{process}": 0.5})
    return count


def hold(path: str) -> None:
    """Keeps the database locked until killed, with half a transaction already in the file."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")  # so that it spills
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("DELETE FROM epochs")
    for _ in range(200):
        connection.execute("UPDATE runs SET nodes = ?", ("x" * 100_000,))
        connection.execute("INSERT INTO epochs VALUES (NULL, 1, 99, 'failed', ?, '[]', 0)", ("y" * 10_000,))
    print("LOCKED", flush=True)
    threading.Event().wait()


def replace_for_ever(path: str) -> None:
    """Writes one epoch after the other until killed."""
    handler = metadata.JsonMetadataHandler(path)
    epoch = 0
    while True:
        epoch += 1
        handler.write(epoch)
        if epoch == 5:
            print("WRITING", flush=True)
