"""The documentation as a site: it builds without a warning, every public name has its place in the reference, and a
browser shows all of it.
"""

import functools
import html
import http.server
import inspect
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types

import pytest

import epochckpt as ec

pytest.importorskip("mkdocs", reason='the site is built by what `pip install -e ".[docs]"` installs')
pytest.importorskip("mkdocstrings")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
"""Elements that have no end."""
WIDTHS = (760, 1200, 1920)  # pixels: half a window, a laptop, a monitor
MEASURE = """<!doctype html><body><script>
const wide = [];
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.width = `${width}px`;
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  frame.src = page;
  document.body.append(frame);
  await loaded;
  await new Promise((resolve) => setTimeout(resolve, 100));  // until the theme has wrapped the tables
  const shown = frame.contentDocument, whole = shown.documentElement;
  if (whole.scrollWidth > whole.clientWidth + 1) wide.push(`${page} at ${width}: the page`);
  for (const table of shown.querySelectorAll("table")) {
    const room = Math.min(table.parentElement.clientWidth, table.clientWidth);  // a table may scroll, too
    const wanted = Math.max(table.offsetWidth, table.scrollWidth);
    if (wanted > room + 2) wide.push(`${page} at ${width}: ${wanted} in ${room}: ${table.rows[0].innerText}`);
  }
  measured += shown.querySelectorAll("table").length;
  frame.remove();
}
let measured = 0;
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await measure(page, width);
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify({wide, measured});
})();
</script>"""


def members_of(name: str, thing: type) -> set[str]:
    """The public members that a class has from epochckpt, by full name; fields and Orbax's own are not asked for."""
    ours = [base for base in thing.__mro__ if base.__module__.split(".")[0] == "epochckpt"]
    functions = (types.FunctionType, property, classmethod, staticmethod)
    return {
        f"{name}.{member}"
        for base in ours
        for member, value in vars(base).items()
        if not member.startswith("_") and isinstance(value, functions)
    }


def public_names() -> set[str]:
    """Everything that `epochckpt` and its public modules export."""
    found: set[str] = set()
    for name in ec.__all__:
        thing = getattr(ec, name)
        if isinstance(thing, types.ModuleType):
            names = getattr(thing, "__all__", None) or [
                n
                for n, value in vars(thing).items()
                if not n.startswith("_") and getattr(value, "__module__", "") == thing.__name__
            ]
            found |= {f"epochckpt.{name}.{n}" for n in names}
        else:
            home = "epochckpt.errors" if name in vars(ec.errors) else "epochckpt"
            found.add(f"{home}.{name}")
    return found | members_of("epochckpt.CheckpointManager", ec.CheckpointManager) | members_of("epochckpt.Job", ec.Job)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """All pages, built strictly: a broken link or a parameter that does not exist is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def reference(site: pathlib.Path) -> str:
    """The pages of the reference."""
    return "".join(page.read_text(encoding="utf-8") for page in sorted((site / "api").rglob("*.html")))


def test_every_public_name_is_in_the_reference(reference: str) -> None:
    assert {name for name in public_names() if f'id="{name}"' not in reference} == set()


def test_examples_are_shown_as_code(reference: str) -> None:
    """An example that is no section `Examples:` of its docstring would run together as prose."""
    prose = re.sub(r"<pre.*?</pre>", "", reference, flags=re.DOTALL)
    assert reference.count("&gt;&gt;&gt;") > 50
    assert re.findall(r"(?:&gt;|>){3} .{0,60}", prose) == []


def test_no_placeholder_is_taken_for_a_tag(site: pathlib.Path) -> None:
    """`<epoch>` outside of code would begin an element that nothing ends, and that a browser does not show."""
    for page in site.rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        for tag in set(re.findall(r"<([A-Za-z][\w-]*)", text)) - VOID:
            begun, ended = len(re.findall(rf"<{tag}[\s>]", text)), text.count(f"</{tag}>")
            assert begun == ended, f"{page.relative_to(site)}: <{tag}> {begun} times, </{tag}> {ended} times"


def test_the_home_page_has_the_numbers_and_the_code_of_the_readme() -> None:
    """Install, a manager, a whole run and the measured times are the same in both, word for word."""
    readme, home = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    shown = re.findall(r"^```.*?^```$|(?:^\|[^\n]*\n)+", home, re.MULTILINE | re.DOTALL)
    assert len(shown) >= 5
    assert [block for block in shown if block not in readme] == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_no_table_is_wider_than_its_page(site: pathlib.Path) -> None:
    """In a browser, at three widths: what is cut off at the right is a table's last column, its most important one."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("index.html"))]
    values = f"<script>const PAGES = {json.dumps(pages)}, WIDTHS = {json.dumps(WIDTHS)};</script>"
    (site / "measure.html").write_text(values + MEASURE, encoding="utf-8")
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=600000"]
            command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--dump-dom"]
            command += [f"http://127.0.0.1:{server.server_port}/measure.html"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        finally:
            server.shutdown()
    answer = re.search(r"<pre>(.*)</pre>", shown, re.DOTALL)
    assert answer is not None, shown[-2000:]
    found = json.loads(html.unescape(answer[1]))
    assert found["measured"] > 100
    assert found["wide"] == []


def test_every_public_name_has_a_docstring() -> None:
    """Constants have theirs in the source, below them; the site shows it."""
    undocumented = set()
    for name in public_names():
        thing: object = ec
        for part in name.split(".")[1:]:
            thing = inspect.getattr_static(thing, part) if isinstance(thing, type) else getattr(thing, part)
        if isinstance(thing, type | types.FunctionType | property) and not inspect.getdoc(thing):
            undocumented.add(name)
    assert undocumented == set()
