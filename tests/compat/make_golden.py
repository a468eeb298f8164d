"""Makes the golden directories of `tests/compat/data/epochckpt-1`, with the code of today.

    python -m tests.compat.make_golden [name …]

Run it after a change of the format that docs/format.md tells of, and commit what it writes. An archive whose directory
differs in nothing but ids and times is left as it is.
"""

import pathlib
import sys
import tempfile

from tests.support import golden


def main(names: list[str]) -> None:
    golden.DATA.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, made in golden.GOLDEN.items():
            archive, fresh, old = (
                golden.DATA / f"{name}.tar.xz",
                pathlib.Path(scratch, name),
                pathlib.Path(scratch, f"{name}.old"),
            )
            if not names or name in names:
                made.make(fresh)
                if archive.exists() and not golden.differences(golden.unpack(name, old), fresh):
                    print(f"{name}: as before")
                else:
                    archive.write_bytes(golden.pack(fresh))
                    print(f"{name}: {archive.stat().st_size} bytes")
            if not archive.exists():
                continue
            kept = golden.unpack(name, pathlib.Path(scratch, f"{name}.kept"))
            lines += [f"{digest}  {name}/{path}\n" for path, digest in golden.sums(kept).items()]
    golden.SUMS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
