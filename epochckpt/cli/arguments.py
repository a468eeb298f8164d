"""What can be typed after `epochckpt`: commands, options, help."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from epochckpt import _units

DIRECTORY_HELP = "checkpoint directory: a path, or a URL such as gs://bucket/run or s3://bucket/run"
EPOCH_HELP = "a number, `latest`, or `best` (with --metric); default: latest"

EXIT_CODES = """\
exit codes:
  0    fine
  1    damage was found; diff: there are differences
  2    wrong usage
  3    no such directory, epoch or leaf, or no checkpoint directory
  4    no permission, or storage cannot be reached
  5    verify: only the Orbax view is damaged; epochckpt reads the epochs, stock Orbax may not (--repair-view)
  70   a fault of epochckpt itself
  130  interrupted (Ctrl-C)
  141  whoever read the output went away (| head)
"""

_Commands = Any  # argparse gives its type no public name


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


def epoch(value: str) -> int | str:
    """`latest`, `best` or a number."""
    return value if value in ("latest", "best") else _number(value)


def _number(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is no epoch; expected a number, `latest` or `best`")
    return int(value)


class _Intermixed(argparse.ArgumentParser):
    """Takes options between positional arguments, too: `show DIR --metric loss best`."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ArgumentParser."""
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def parser(version: str) -> argparse.ArgumentParser:
    """The parser of the command line; what it parses has the command's name as `command`."""
    top = argparse.ArgumentParser(
        "epochckpt",
        description="Looks at checkpoints: reads only (but gc --delete and export), starts no JAX\n"
        "backend, and needs nothing of the training code. Works beside a run that is saving.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"epochckpt {version}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Intermixed)
    _ls(commands)
    _show(commands)
    _tree(commands)
    _stat(commands)
    _diff(commands)
    _verify(commands)
    _gc(commands)
    _export(commands)
    _watch(commands)
    return top


def _command(commands: _Commands, name: str, summary: str, example: str, more: str = "") -> argparse.ArgumentParser:
    added = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {more}".strip(), 79),
        epilog=f"{example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument("directory", metavar="DIR", help=DIRECTORY_HELP)
    general = added.add_argument_group("general")
    general.add_argument("--json", action="store_true", help="one JSON document on stdout, for programs")
    general.add_argument("--debug", action="store_true", help="show where an error comes from")
    names = added.add_argument_group("names of epochs' folders, as the manager's options have them")
    names.add_argument("--step-prefix", metavar="TEXT", help="PREFIX_12 instead of 12")
    names.add_argument("--step-format-fixed-length", metavar="N", type=count, help="00000012 instead of 12")
    return added


def _metric(added: argparse.ArgumentParser) -> None:
    group = added.add_argument_group("which epoch is the best")
    group.add_argument("--metric", metavar="NAME", default="", help="by this metric")
    group.add_argument("--mode", choices=("min", "max"), default="max", help="the least or the greatest; default: max")


def _epoch(added: argparse.ArgumentParser) -> None:
    added.add_argument("epoch", metavar="EPOCH", nargs="?", type=epoch, default="latest", help=EPOCH_HELP)
    _metric(added)


def _leaves(added: argparse.ArgumentParser) -> None:
    added.add_argument(
        "patterns",
        metavar="PATTERN",
        nargs="*",
        help="leaves, parts of the tree, items or ITEM:LEAF, by name or shell pattern (params, '*/bias', model:*); "
        "default: all",
    )
    added.add_argument("--item", metavar="NAME", help="of this item only")
    added.add_argument("--node", metavar="NAME", help="of an item that every node has its own of: this node's only")


def _unfolding(added: argparse.ArgumentParser) -> None:
    added.add_argument("--depth", metavar="N", type=count, help="unfold so many levels; default: what fits on a screen")
    added.add_argument("--all", action="store_true", help="unfold everything")
    added.add_argument("--owners", action="store_true", help="draw which node wrote which part of an array")


def _limit(added: argparse.ArgumentParser, what: str, default: int) -> None:
    added.add_argument("--limit", metavar="N", type=count, default=default, help=f"{what}; 0: all; default: {default}")


def _ls(commands: _Commands) -> None:
    added = _command(
        commands,
        "ls",
        "list the epochs of a directory: state, size, times, metrics, nodes",
        "example:\n  epochckpt ls /data/run --metric loss --mode min",
        "Each node of an epoch has a bar, as high as the time that it took to write; × is a damaged one.",
    )
    _metric(added)
    _limit(added, "show the newest N", 50)
    added.add_argument("--no-check", action="store_true", help="read records only, do not look for missing files")


def _show(commands: _Commands) -> None:
    added = _command(
        commands,
        "show",
        "show one epoch: what is known of it, its nodes, its items",
        "example:\n  epochckpt show /data/run best --metric accuracy",
    )
    _epoch(added)
    _unfolding(added)


def _tree(commands: _Commands) -> None:
    added = _command(
        commands,
        "tree",
        "show the leaves of an epoch as a tree: types, shapes, sizes, who holds what",
        "examples:\n  epochckpt tree /data/run 12 params/decoder --depth 3\n"
        "  epochckpt tree /data/run latest '*/kernel' --all --owners",
    )
    _epoch(added)
    _leaves(added)
    _unfolding(added)


def _stat(commands: _Commands) -> None:
    added = _command(
        commands,
        "stat",
        "read arrays of an epoch and show their statistics: range, mean, norm, NaN, a histogram",
        "example:\n  epochckpt stat /data/run latest '*/kernel'",
    )
    _epoch(added)
    _leaves(added)


def _diff(commands: _Commands) -> None:
    added = _command(
        commands,
        "diff",
        "compare two epochs leaf by leaf",
        "examples:\n  epochckpt diff /data/run 11 12\n"
        "  epochckpt diff /data/run latest latest params --other /data/old",
        "Relative is the norm of the change, divided by the norm of the leaf before.",
    )
    added.add_argument("before", metavar="A", type=epoch, help="a number, `latest`, or `best` (with --metric)")
    added.add_argument("after", metavar="B", type=epoch, help="the same")
    _leaves(added)
    _metric(added)
    added.add_argument("--other", metavar="DIR2", help="B lies in this directory")
    added.add_argument("--unchanged", action="store_true", help="list those, too, that did not change")
    _limit(added, "list so many leaves", 200)


def _verify(commands: _Commands) -> None:
    added = _command(
        commands,
        "verify",
        "read every byte of epochs and compare it with the recorded checksums",
        "examples:\n  epochckpt verify /data/run\n  epochckpt verify /data/run 11 12 || echo damaged\n"
        "  epochckpt verify /data/run --repair-view",
    )
    added.add_argument(
        "--repair-view",
        action="store_true",
        help="make the Orbax view, by which stock Orbax reads an epoch, anew where it is damaged or gone",
    )
    added.add_argument(
        "epochs", metavar="EPOCH", nargs="*", type=epoch, help="numbers, `latest`, `best` (with --metric); default: all"
    )
    _metric(added)


def _gc(commands: _Commands) -> None:
    added = _command(
        commands,
        "gc",
        "list what no run and no reader needs any more: attempts that failed, half-done removals",
        "examples:\n  epochckpt gc /data/run\n  epochckpt gc /data/run --delete --older-than 1d",
        "Nothing is removed without --delete; epochs never are.",
    )
    added.add_argument("--delete", action="store_true", help="remove it")
    added.add_argument(
        "--older-than",
        metavar="TIME",
        type=span,
        default=86400.0,
        help="leave alone what something was written to within this time (15min, 2h, 1d); default: 1d",
    )
    added.add_argument("--rolled-back", action="store_true", help="also epochs that were rolled back or quarantined")
    added.add_argument("--save-timeout", metavar="TIME", type=span, help="of the job, if longer than the default 10min")
    added.add_argument("--todelete-subdir", metavar="NAME", help="the folder that this option of the manager names")


def _export(commands: _Commands) -> None:
    added = _command(
        commands,
        "export",
        "write an epoch as a stock Orbax checkpoint or as safetensors files, every byte verified",
        "examples:\n  epochckpt export /data/run latest /tmp/for-orbax --format orbax\n"
        "  epochckpt export /data/run 12 /tmp/model --format safetensors --item params",
    )
    added.add_argument("epoch", metavar="EPOCH", type=epoch, help="a number, `latest`, or `best` (with --metric)")
    added.add_argument("destination", metavar="DEST", help="a local folder that is missing or empty")
    added.add_argument("--format", choices=("orbax", "safetensors"), required=True, help="what to write")
    added.add_argument("--item", metavar="NAME", help="this item only")
    added.add_argument("--separator", metavar="TEXT", default=".", help="safetensors: joins keys to names; default: .")
    added.add_argument("--skip-unsupported", action="store_true", help="leave out what the format cannot express")
    _metric(added)


def _watch(commands: _Commands) -> None:
    added = _command(
        commands,
        "watch",
        "follow a live run: epochs as they are committed, the progress of a save, saves that fail",
        "examples:\n  epochckpt watch /data/run\n  epochckpt watch /data/run --json --until 100 --timeout 2h",
        "Ends with Ctrl-C. --json gives a line per event.",
    )
    _metric(added)
    added.add_argument("--until", metavar="EPOCH", type=count, help="end when this epoch, or a later one, is there")
    added.add_argument(
        "--timeout", metavar="TIME", type=span, help="end, with code 3, after this time without an epoch"
    )
    added.add_argument("--interval", metavar="TIME", type=span, default=1.0, help="how often to look; default: 1s")
    added.add_argument("--wait", action="store_true", help="wait for the directory if it does not exist yet")
