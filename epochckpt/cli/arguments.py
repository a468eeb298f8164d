"""The parser of the command line: commands, options, help."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from epochckpt import _units
from epochckpt.cli import changes, commands, watch
from epochckpt.convert.formats import EXPORTED, IMPORTED
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.options import BucketSettings

if TYPE_CHECKING:
    from epochckpt.cli.output import Output

EXIT_CODES = """\
exit codes:
  0    fine
  1    damage was found; diff: there are differences
  2    wrong usage
  3    no such directory, epoch or leaf, or not a checkpoint directory
  4    no permission, or storage cannot be reached
  5    verify: only the Orbax view is damaged; epochckpt reads the epochs, stock Orbax may not (--repair-view)
  70   an internal error of epochckpt
  130  interrupted (Ctrl-C)
  141  the reader of the output has closed it (| head)
"""

_DIRECTORY = (
    "checkpoint directory: a path, or a URL such as gs://bucket/run or s3://bucket/run?endpoint=http://host:9000"
)
_EPOCH = "a number, `latest`, or `best` (with --metric)"
_PATTERN = "leaves, parts of the tree, items or ITEM:LEAF, by name or shell pattern (params, '*/bias', model:*)"

_LOOKING_AT_MIRRORS = (
    commands.ls,
    commands.show,
    commands.tree,
    commands.stat,
    commands.diff,
    commands.verify,
    commands.export,
    changes.rm,
    changes.rollback,
    changes.cp,
)


def span(value: str) -> float:
    """Seconds of a duration such as `90`, `15min`, `2h`, `1d`."""
    try:
        return _units.parse_secs(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is no duration such as 15min, 2h or 1d: {error}") from None


def count(value: str) -> int:
    """An integer of at least 0."""
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is no number of at least 0")
    return int(value)


def size(value: str) -> int:
    """Bytes of a size such as `500MB`, `5GB`."""
    try:
        return _units.parse_nbytes(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is no size such as 500MB or 5GB: {error}") from None


def store(value: str) -> BucketSettings:
    """Settings of a bucket; an error does not repeat them."""
    try:
        return BucketSettings.of(value, "settings")
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def renaming(value: str) -> tuple[str, str]:
    """An old and a new name."""
    old, mark, new = value.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"{value!r} is no OLD=NEW")
    return old, new


def epoch(value: str) -> int | str:
    """`latest`, `best` or a number."""
    if value in ("latest", "best"):
        return value
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is no epoch; expected a number, `latest` or `best`")
    return int(value)


class _Intermixed(argparse.ArgumentParser):
    """Takes options between positional arguments, too: `show DIR --metric loss best`."""

    _inside = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # the base has overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """See ArgumentParser; `parse_known_intermixed_args` calls this method again."""
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


class _Version(argparse.Action):
    """`--version`, which reads what is installed only when it is asked: that takes as long as all else at the start."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from importlib import metadata

        try:
            version = metadata.version("epochckpt")
        except metadata.PackageNotFoundError:  # run from its sources
            version = "unknown"
        print(f"epochckpt {version}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of the command line. In its result, `run` is the function that runs the command."""
    top = argparse.ArgumentParser(
        "epochckpt",
        description="Looks at checkpoints: reads only (but gc --delete, export, and commands with --yes), starts no\n"
        "JAX backend, and needs nothing of the training code. Works beside a run that is saving.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, help="show the version, and exit")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Intermixed)

    def command(
        run: Callable[[argparse.Namespace, Output], int], *examples: str, marks: bool = True, source: str = ""
    ) -> Callable[..., argparse.Action]:
        """Adds a command with the common options, and with `marks` those about the best epoch; returns `add_argument`.

        `source`: describes the FILE before the directory, for commands with such an argument.
        """
        name = run.__name__.rstrip("_")
        about = " ".join((run.__doc__ or "").split())
        added = subparsers.add_parser(
            name,
            help=f"{about[:1].lower()}{about.partition('. ')[0].rstrip('.')[1:]}",
            description=textwrap.fill(about, 79),
            epilog="\n".join(["examples:", *(f"  epochckpt {name} {example}" for example in examples), "", EXIT_CODES]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        if source:
            added.add_argument("source", metavar="FILE", help=source)
        added.add_argument("directory", metavar="DIR", help=_DIRECTORY)
        general = added.add_argument_group("general")
        general.add_argument("--json", action="store_true", help="one JSON document on stdout, for programs")
        general.add_argument(
            "--store",
            metavar="SETTINGS",
            type=store,
            help="how a bucket is reached, as in its URL's query: endpoint=http://host:9000&region=eu-west-1",
        )
        general.add_argument("--debug", action="store_true", help="show where an error comes from")
        names = added.add_argument_group("names of epochs' folders, as the manager's options have them")
        names.add_argument("--step-prefix", metavar="TEXT", help="PREFIX_12 instead of 12")
        names.add_argument("--step-format-fixed-length", metavar="N", type=count, help="00000012 instead of 12")
        if run in _LOOKING_AT_MIRRORS:
            mirror = "the directory's mirror, which is looked at, too; the address that the directory has is only shown"
            added.add_argument("--mirror", metavar="URL", help=mirror)
        if marks:
            best = added.add_argument_group("which epoch is the best")
            best.add_argument(
                "--metric", metavar="NAME", action="append", help="by this metric; more than one: show these alone"
            )
            best.add_argument("--mode", choices=("min", "max"), default="max", help="which value is best; default: max")
        if run is not commands.repair:
            unit = "what to call a number; default: what the job that saved it counts"
            added.add_argument("--unit", choices=("epoch", "step"), help=unit)
        return added.add_argument

    add = command(commands.ls, "/data/run --metric loss --mode min", "/data/all_my_runs --sort loss")
    add("--limit", metavar="N", type=count, default=50, help="show the newest N; 0: all; default: 50")
    add("--no-check", action="store_true", help="read records only, do not look for missing files")
    columns = "order the runs of a folder by a column, a metric or a value of the configs; --sort=-COLUMN: descending"
    add("--sort", metavar="COLUMN", help=columns)

    todelete = "the folder that this option of the manager names"
    add = command(commands.du, "/data/run", "gs://bucket/run --json", marks=False)
    add("--limit", metavar="N", type=count, default=50, help="show the newest N epochs; 0: all; default: 50")
    add("--todelete-subdir", metavar="NAME", help=todelete)

    command(commands.goodput, "/data/run", "gs://bucket/run --json", marks=False)

    add = command(commands.show, "/data/run best --metric accuracy")
    _epoch(add)
    _unfolding(add)

    add = command(commands.tree, "/data/run 12 params/decoder --depth 3", "/data/run latest '*/kernel' --all --owners")
    _epoch(add)
    _leaves(add)
    _unfolding(add)

    add = command(commands.stat, "/data/run latest '*/kernel'")
    _epoch(add)
    _leaves(add)

    add = command(commands.diff, "/data/run 11 12", "/data/run latest latest params --other /data/old")
    add("before", metavar="A", type=epoch, help=_EPOCH)
    add("after", metavar="B", type=epoch, help="the same")
    _leaves(add)
    add("--other", metavar="DIR2", help="B lies in this directory")
    add("--unchanged", action="store_true", help="list those, too, that did not change")
    add("--limit", metavar="N", type=count, default=200, help="list N leaves; 0: all; default: 200")

    add = command(commands.verify, "/data/run", "/data/run 11 12 || echo damaged", "/data/run --repair-view")
    repair = "make the Orbax view, by which stock Orbax reads an epoch, anew where it is damaged or gone"
    add("--repair-view", action="store_true", help=repair)
    add("epochs", metavar="EPOCH", nargs="*", type=epoch, help=f"{_EPOCH}; default: all")

    add = command(commands.gc, "/data/run", "/data/run --delete --older-than 1d", marks=False)
    older = "leave alone what something was written to within this time (15min, 2h, 1d); default: 1d"
    add("--delete", action="store_true", help="remove it")
    add("--older-than", metavar="TIME", type=span, default=86400.0, help=older)
    add("--rolled-back", action="store_true", help="also epochs that were rolled back or quarantined")
    add("--save-timeout", metavar="TIME", type=span, help="of the job, if longer than the default 10min")
    add("--todelete-subdir", metavar="NAME", help=todelete)

    add = command(commands.repair, "gs://bucket/run", "gs://bucket/run --yes", marks=False)
    add("--yes", action="store_true", help="write it")

    run = "/data/run"
    add = command(changes.rm, f"{run} 3 4", f"{run} 3 4 --yes")
    _change(add)
    add("epochs", metavar="EPOCH", nargs="+", type=epoch, help=_EPOCH)

    add = command(changes.rollback, f"{run} 12", f"{run} best --metric loss --mode min --yes")
    _change(add)
    add("epoch", metavar="EPOCH", type=epoch, help=_EPOCH)

    add = command(changes.cp, f"{run} gs://bucket/run", "gs://bucket/run /tmp/best best --metric accuracy --yes")
    _change(add)
    add("destination", metavar="DEST", help="a checkpoint directory, an empty folder, or a new one: a path or a URL")
    add("epochs", metavar="EPOCH", nargs="*", type=epoch, help=f"{_EPOCH}; default: all, and the directory's metadata")

    add = command(
        changes.import_,
        "params.msgpack /data/run",
        "hugging_face_folder gs://bucket/run --rename model=params --dtype bfloat16 --yes",
        marks=False,
        source="a .safetensors or flax .msgpack file, or a folder: of one, of Hugging Face, of PyTorch's DCP",
    )
    _change(add)
    add("--epoch", metavar="N", type=count, help="its number; default: the next one, from 0")
    add("--item", metavar="NAME", default=paths.DEFAULT_ITEM, help="the item that holds it; default: %(default)s")
    add("--format", choices=IMPORTED, help="of the file; default: by its name, or its first bytes")
    add("--separator", metavar="TEXT", default=".", help="safetensors: splits names into keys; default: .")
    _selection(add)
    add("--limit", metavar="N", type=count, default=50, help="list N leaves; 0: all; default: 50")

    add = command(
        commands.export,
        "/data/run latest /tmp/for-orbax --format orbax",
        "/data/run 12 /tmp/model --format safetensors --item params",
        "/data/run best /tmp/hf --format huggingface --include params --rename params=model --dtype bfloat16",
    )
    add("epoch", metavar="EPOCH", type=epoch, help=_EPOCH)
    add("destination", metavar="DEST", help="a local folder that is missing or empty")
    add("--format", choices=EXPORTED, required=True, help="what to write")
    add("--item", metavar="NAME", help="this item only")
    _selection(add)
    add("--separator", metavar="TEXT", default=".", help="safetensors: joins keys to names; default: .")
    add("--framework", metavar="NAME", default="flax", help="safetensors: whose names and layouts they are (pt)")
    add("--max-file-size", metavar="SIZE", type=size, help="of tensors in a safetensors file; default: 5GB")
    add("--config", metavar="FILE", help="huggingface: JSON that becomes config.json")
    add("--skip-unsupported", action="store_true", help="leave out what the format cannot express")

    add = command(watch.watch, "/data/run", "/data/run --json --until 100 --timeout 2h")
    add("--until", metavar="EPOCH", type=count, help="end when this epoch, or a later one, is there")
    add("--timeout", metavar="TIME", type=span, help="end with code 3 after this time without an epoch")
    add("--interval", metavar="TIME", type=span, default=1.0, help="how often to look; default: 1s")
    add("--wait", action="store_true", help="wait for the directory if it does not exist yet")
    return top


def _change(add: Callable[..., argparse.Action]) -> None:
    take_over = "fence off a run that has not closed the directory: one on another host may be dead without a sign"
    add("--yes", action="store_true", help="do it")
    add("--take-over", action="store_true", help=take_over)


def _epoch(add: Callable[..., argparse.Action]) -> None:
    add("epoch", metavar="EPOCH", nargs="?", type=epoch, default="latest", help=f"{_EPOCH}; default: latest")


def _leaves(add: Callable[..., argparse.Action]) -> None:
    add("patterns", metavar="PATTERN", nargs="*", help=f"{_PATTERN}; default: all")
    add("--item", metavar="NAME", help="of this item only")
    add("--node", metavar="NAME", help="of an item that every node has its own of: this node's only")


def _selection(add: Callable[..., argparse.Action]) -> None:
    leaves = "leaves or parts of the tree, by name or shell pattern (params, '*/kernel'); it may be repeated"
    add("--include", metavar="PATTERN", action="append", help=f"only these {leaves}")
    add("--exclude", metavar="PATTERN", action="append", help="not these, in the same form")
    renames = "a leaf, or part of the tree, gets another name ('h/*/w=layers/*/kernel'); it may be repeated"
    add("--rename", metavar="OLD=NEW", action="append", type=renaming, default=[], help=renames)
    add("--dtype", metavar="NAME", help="cast floating arrays: bfloat16, float32, …")


def _unfolding(add: Callable[..., argparse.Action]) -> None:
    add("--depth", metavar="N", type=count, help="unfold so many levels; default: what fits on a screen")
    add("--all", action="store_true", help="unfold everything")
    add("--owners", action="store_true", help="show which nodes and devices have which part of an array")
