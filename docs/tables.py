"""Writes the parts of these pages that are made of the code: `python docs/tables.py`. A test sees a part that is old.

Such a part stands between `<!-- made of NAME -->` and `<!-- end -->`, with a name of `PARTS`. Settings are cut into
several tables: `<!-- made of settings from NAME -->` has those from this setting up to the first one of the next table.
"""

import ast
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from epochckpt._settings import RULES, SETTINGS
from epochckpt.format.checksums import BLOCK_CHECKSUMS
from epochckpt.inspection.epoch_table import EpochTable
from epochckpt.inspection.rows import Overview
from epochckpt.jobs.stop import CONDITIONS
from epochckpt.options import BUCKET_SETTINGS
from epochckpt.storage.schemes import SCHEMES

FOLDER = pathlib.Path(__file__).resolve().parent
TESTS = FOLDER.parent / "tests"
PART = re.compile(r"<!-- made of (?P<name>\w+)(?: from (?P<first>\w+))? -->\n.*?<!-- end -->", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def settings(first: str, firsts: Sequence[str]) -> str:
    """The settings from this one on, up to the first one of another table."""
    names = list(SETTINGS)
    start = names.index(first)
    end = min((names.index(name) for name in firsts if names.index(name) > start), default=len(names))
    rows = []
    for name in names[start:end]:
        row = SETTINGS[name]
        default = row.kind.serialize(row.default)
        rows.append([f"`{name}`", default and f"`{default}`", f"`{row.owner}.{row.option}`", row.help])
    return table(["setting", "default", "sets", "what it is for"], rows)


def rules() -> str:
    """What settings need and exclude."""
    alike: dict[tuple[bool, str, str], list[str]] = {}
    for rule in RULES:
        alike.setdefault((rule.needed, rule.other, rule.why), []).append(f"`{rule.name}`")
    lines = []
    for (needed, other, why), names in alike.items():
        verb = ("needs" if len(names) == 1 else "need") if needed else "cannot stand beside"
        lines.append(f"- {', '.join(names)} {verb} `{other}`: {why}.")
    return "\n".join(textwrap.fill(line, width=120, subsequent_indent="  ") for line in lines)


def bucket_settings() -> str:
    """The settings of buckets, and the schemes that they are for."""
    rows = []
    for name, option in BUCKET_SETTINGS.items():
        schemes = [f"`{row.name}`" for row in SCHEMES.values() if name in row.settings]
        rows.append([f"`{name}`", ", ".join(schemes) or "all", option.help])
    return table(["setting", "for", "what it is for"], rows)


def stop_conditions() -> str:
    """The conditions of `ec.stop`, as their signatures and docstrings say."""
    rows = []
    for name, condition in CONDITIONS.items():
        call = ""
        if isinstance(condition, type):
            parameters = inspect.signature(condition).parameters.values()
            bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
            call = str(inspect.Signature(bare))
        first = (inspect.getdoc(condition) or "").partition("\n")[0]
        rows.append([f"`ec.stop.{name}{call}`", first.removeprefix("True ").removesuffix(".")])
    return table(["condition", "true"], rows)


def epoch_columns() -> str:
    """The columns in tables of epochs, with their explanations."""
    columns = [column for column, _ in EpochTable(Overview("", ())).columns()]
    rows = [[f"`{column.title.removeprefix('0 ')}`", column.tip] for column in columns if column.tip]
    return table(["column", "what it shows"], rows)


def schemes() -> str:
    """The schemes of buckets."""
    rows = []
    for row in SCHEMES.values():
        variables = ", ".join(f"`{name}`" for name in row.server_variables)
        rows.append([f"`{row.example}`", row.about, variables, "yes" if row.stock_orbax else "no"])
    return table(["directory", "where it is", "variables that name another server", "stock Orbax reads it there"], rows)


def block_checksums() -> str:
    """The kinds of checksums that blocks may have."""
    rows = [[f"`{row.name}`", row.about, str(row.digits)] for row in BLOCK_CHECKSUMS.values()]
    return table(["field", "checksum", "hex digits"], rows)


def tests() -> str:
    """What the tests of each file show, in the words with which the file begins."""
    parts = []
    for folder in sorted({path.parent for path in TESTS.rglob("test_*.py")}):
        rows = []
        for path in sorted(folder.glob("test_*.py")):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append([" ".join(said.partition("\n\n")[0].split()), f"[{path.name}]({path.relative_to(TESTS)})"])
        parts.append(f"### {folder.relative_to(TESTS)}\n\n{table(['what is shown', 'file'], rows)}")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "rules": rules,
    "bucket_settings": bucket_settings,
    "stop_conditions": stop_conditions,
    "epoch_columns": epoch_columns,
    "schemes": schemes,
    "block_checksums": block_checksums,
    "tests": tests,
}
"""What makes a part, by its name."""


def renewed(page: str) -> str:
    """The text of a page, with its parts as the code makes them now; KeyError for a name that is unknown."""
    firsts = [found["first"] for found in PART.finditer(page) if found["first"]]

    def made(found: re.Match[str]) -> str:
        begin, end = found[0].partition("\n")[0], "<!-- end -->"
        content = settings(found["first"], firsts) if found["first"] else PARTS[found["name"]]()
        return f"{begin}\n\n{content}\n\n{end}"

    return PART.sub(made, page)


def pages() -> list[pathlib.Path]:
    """The pages that may have such parts."""
    return [*sorted(FOLDER.glob("*.md")), TESTS / "README.md"]


def main() -> None:
    """Writes the pages of which a part is old, and names them."""
    for path in pages():
        page = path.read_text(encoding="utf-8")
        if (new := renewed(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"written: {path.name}")


if __name__ == "__main__":
    main()
