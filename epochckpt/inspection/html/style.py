"""The one style sheet of all HTML views: colours of two themes, and rules that stay inside the view.

A notebook has its own style (Jupyter centres tables, aligns their text right and stripes their rows), so every rule
names the root's class twice: it then outweighs the notebook's, and touches nothing outside. A notebook's theme need not
be the system's, so the marks that Jupyter, VS Code, Colab and Sphinx put on a page decide before media queries. The
background is our own in both themes, so that text can be read where the guess is wrong.
"""

import re

PREFIX = "eckpt"
_ROOT = f".{PREFIX}.{PREFIX}"

# In the light and in the dark theme. `fg` is text, `line` borders, `soft` headings and stripes, `bar` and `track` bars.
# `faint` to `warn` are tones; `bad-bg` is behind problems.
_COLOURS = {
    "bg": ("#ffffff", "#14171c"),
    "fg": ("#1c2430", "#e4e8ee"),
    "faint": ("#5a6472", "#a3adba"),
    "line": ("#d9dee5", "#363e4a"),
    "soft": ("#f4f6f8", "#1d222a"),
    "track": ("#e8ecf1", "#262d37"),
    "bar": ("#8fb0da", "#4a709f"),
    "good": ("#176f31", "#5fd573"),
    "bad": ("#b42020", "#ff8a82"),
    "live": ("#1a57a8", "#82bcff"),
    "warn": ("#725300", "#e3b54a"),
    "bad-bg": ("#fde8e8", "#431b1c"),
}
LIGHT, DARK = ({name: pair[theme] for name, pair in _COLOURS.items()} for theme in (0, 1))

_IS_LIGHT = 'body[data-jp-theme-light="true"]', "body.vscode-light", "body.vscode-high-contrast-light"
_IS_DARK = (
    'body[data-jp-theme-light="false"]',
    "body.vscode-dark",
    "body.vscode-high-contrast:not(.vscode-high-contrast-light)",
)

# `&` stands for the root, `.x` for a class of ours. Lengths in em, so that a notebook's zoom holds.
_RULES = """
& { box-sizing:border-box; max-width:100%; margin:0; padding:.8em 1em; border:1px solid $line; border-radius:6px;
  background:$bg; color:$fg; font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
  font-variant-numeric:tabular-nums; text-align:left; overflow-wrap:anywhere; white-space:pre-wrap }
& * { box-sizing:border-box }
& .title { font-size:1.1em; margin:0 0 .3em }
& .summary { display:flex; flex-wrap:wrap; gap:.25em 1.2em; margin:0 0 .6em }
& .strong { font-weight:600 }
& .faint { color:$faint }
& .good { color:$good }
& .bad { color:$bad }
& .warn { color:$warn }
& .live { color:$live }
& .problem { margin:.4em 0; padding:.35em .7em; border-left:3px solid $bad; background:$bad-bg; color:$fg }
& .scroll { overflow-x:auto; max-width:100%; container-type:inline-size }
& table { min-width:min(100%,44em); margin:.3em 0; border:0; border-collapse:collapse; font-size:1em;
  background:$bg; color:$fg }
& tr, & tbody tr:nth-child(n), & tbody tr:nth-child(n):hover { background:transparent; color:$fg; border:0 }
& tbody tr.row:nth-child(n):hover { background:$soft }
& tr td, & tr th { padding:.25em .45em; border:0; border-top:1px solid $line; text-align:left; vertical-align:top;
  max-width:24em; overflow-wrap:break-word; line-height:1.45; font-weight:400; color:inherit; background:transparent }
& tr td:first-child { min-width:5.5em }
& tr th { border-top:0; color:$faint; white-space:nowrap }
& tr td.right, & tr th.right, & .tree .right { text-align:right; white-space:nowrap }
& tr.below td { border-top:0; padding:0; max-width:none }
& tr.below div { position:sticky; left:0; width:fit-content; max-width:min(100%,100cqi); padding:0 .45em .35em 4em }
& .bar { display:block; height:4px; min-width:5em; margin-top:2px; border-radius:2px; overflow:hidden;
  background:$track }
& .bar i { display:block; height:100%; background:$bar }
& .strip { display:flex; align-items:flex-end; min-width:8em; height:24px; margin-top:1px }
& .strip i { flex:0 1 14px; min-width:1px; background:$bar; border-right:1px solid $bg }
& .bar i.warn, & .strip i.warn { background:$fg }
& .strip i.live { background:$live }
& .strip i.faint { background:$track }
& .strip i.bad { background:repeating-linear-gradient(45deg,$bad 0 2px,$bg 2px 4px); outline:1px solid $bad }
& .heat { margin:.4em 0; width:fit-content; max-width:100%; overflow:hidden; border:1px solid $line }
& .heat div { display:flex }
& .heat i { width:9px; height:9px; flex:0 1 9px }
& .heat i.live { background:$live }
& .heat i.warn { background:$warn }
& .heat i.bad { background:$bad }
& details { display:block; margin:.5em 0 0; padding:0; border:0; background:transparent }
& summary { display:block; cursor:pointer; list-style:none; padding:.15em 0; margin:0; color:$fg; font-weight:400 }
& summary::-webkit-details-marker { display:none }
& summary::marker { content:"" }
& summary::before { content:"▸"; display:inline-block; width:1em; color:$faint }
& details[open] > summary::before { content:"▾" }
& summary:hover { background:$soft }
& summary:focus-visible { outline:2px solid $live; outline-offset:-1px }
& .section { margin:.8em 0 0; border-top:1px solid $line; padding-top:.5em }
& .tree { min-width:32em; max-width:72em }
& .placed { min-width:41em }
& .tree .bar { min-width:3em }
& .tree details { margin:0 }
& .tree summary, & .leaf, & .heads { display:grid; align-items:baseline; column-gap:.7em;
  grid-template-columns:minmax(4em,1fr) 5.5em 8.5em 5em 4em; padding:.12em .2em }
& .placed summary, & .placed .leaf, & .placed .heads {
  grid-template-columns:minmax(4em,1fr) 5.5em 8.5em clamp(7.5em,18cqw,14em) 5em 4em }
& .tree details > summary::before, & .tree details[open] > summary::before { content:none }
& .tree summary > :first-child::before { content:"▸"; display:inline-block; width:1.1em; color:$faint }
& .tree details[open] > summary > :first-child::before { content:"▾" }
& .leaf > :first-child { padding-left:1.1em }
& .leaf > *, & .tree summary > * { min-width:0 }
& .leaf:hover { background:$soft }
& .heads { color:$faint; border-bottom:1px solid $line }
& .within { margin-left:.45em; padding-left:.75em; border-left:1px solid $line }
& dl { display:grid; grid-template-columns:fit-content(16em) minmax(0,1fr); gap:.1em 1em; margin:.2em 0 .6em;
  padding:0 }
& dt, & dd { margin:0; padding:0; font-weight:400; float:none; width:auto; min-width:0 }
& dt { color:$faint }
"""


def css() -> str:
    """The style sheet, without its element."""
    light = _variables(LIGHT, "light")
    dark = _variables(DARK, "dark")
    themes = [f"{_ROOT}{{{light}}}", f"@media (prefers-color-scheme:dark){{{_ROOT}{{{dark}}}}}"]
    for theme, variables, pages in (("light", light, _IS_LIGHT), ("dark", dark, _IS_DARK)):
        marked = *pages, f'html[theme="{theme}"]', f'html[data-theme="{theme}"]'
        themes.append(f"{','.join(f'{page} {_ROOT}' for page in marked)}{{{variables}}}")
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", _RULES)
    return "".join([*themes, *(_rule(selector, body) for selector, body in rules)])


def _variables(theme: dict[str, str], scheme: str) -> str:
    return f"color-scheme:{scheme};" + ";".join(f"--{PREFIX}-{name}:{colour}" for name, colour in theme.items())


def _rule(selector: str, body: str) -> str:
    own = re.sub(r"\.(?=[a-z])", f".{PREFIX}-", selector).replace("&", _ROOT)
    body = re.sub(r"\$([a-z-]+)", rf"var(--{PREFIX}-\1)", body)
    return f"{' '.join(own.split())}{{{' '.join(body.split())}}}"
