"""The one style sheet of all HTML views: colours of two themes, and rules that stay inside the view.

A notebook has a style of its own (Jupyter centres tables, aligns their text right and stripes their rows), so every
rule of ours names the root's class twice: it then weighs more than theirs, and touches nothing outside. Media queries
do not know a notebook's theme, which need not be the system's, so the marks that Jupyter, VS Code, Colab and Sphinx put
on a page decide before them. The background is our own in both themes: text can be read wherever the guess is wrong.
"""

from __future__ import annotations

import colorsys
import re

PREFIX = "eckpt"

# `fg` is text, `muted` lesser text, `line` borders, `soft` headings and stripes, `bar` and `track` bars.
# `good`, `bad`, `busy`, `idle` are states, on the background and on their own `…-bg`; `ink` is text on a node's colour.
LIGHT = {
    "bg": "#ffffff",
    "fg": "#1c2430",
    "muted": "#5a6472",
    "line": "#d9dee5",
    "soft": "#f4f6f8",
    "track": "#e8ecf1",
    "bar": "#8fb0da",
    "good": "#176f31",
    "bad": "#b42020",
    "busy": "#1a57a8",
    "idle": "#725300",
    "good-bg": "#e3f4e8",
    "bad-bg": "#fde8e8",
    "busy-bg": "#e5eefb",
    "idle-bg": "#faf0d7",
    "ink": "#14171c",
}
DARK = {
    "bg": "#14171c",
    "fg": "#e4e8ee",
    "muted": "#a3adba",
    "line": "#363e4a",
    "soft": "#1d222a",
    "track": "#262d37",
    "bar": "#4a709f",
    "good": "#5fd573",
    "bad": "#ff8a82",
    "busy": "#82bcff",
    "idle": "#e3b54a",
    "good-bg": "#14311d",
    "bad-bg": "#431b1c",
    "busy-bg": "#17304f",
    "idle-bg": "#392e10",
    "ink": "#14171c",
}
# (text, background): the pairs that the rules put together.
TEXT_ON = [
    *((text, on) for text in ("fg", "muted", "good", "bad", "busy", "idle") for on in ("bg", "soft")),
    *((state, f"{state}-bg") for state in ("good", "bad", "busy", "idle")),
    *(("fg", f"{state}-bg") for state in ("good", "bad", "busy", "idle")),
]

_IS_LIGHT = (
    'body[data-jp-theme-light="true"]',
    "body.vscode-light",
    "body.vscode-high-contrast-light",
    'html[theme="light"]',
    'html[data-theme="light"]',
)
_IS_DARK = (
    'body[data-jp-theme-light="false"]',
    "body.vscode-dark",
    "body.vscode-high-contrast:not(.vscode-high-contrast-light)",
    'html[theme="dark"]',
    'html[data-theme="dark"]',
)

# `&` stands for the root, `.x` for a class of ours. Lengths in em, so that a notebook's zoom holds.
_RULES = """
& { box-sizing:border-box; max-width:100%; margin:0; padding:.8em 1em; border:1px solid $line; border-radius:6px;
  background:$bg; color:$fg; font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
  font-variant-numeric:tabular-nums; text-align:left; overflow-wrap:anywhere }
& * { box-sizing:border-box }
& .title { font-size:1.1em; font-weight:600; margin:0 0 .3em }
& .part { font-weight:600; margin:1em 0 .35em }
& .facts { display:flex; flex-wrap:wrap; gap:.25em 1.2em; margin:0 0 .6em }
& .mono { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.93em }
& .muted { color:$muted; font-weight:400 }
& .good { color:$good }
& .bad { color:$bad }
& .busy { color:$busy }
& .idle { color:$idle }
& .chip { display:inline-block; padding:0 .5em; border-radius:.8em; white-space:nowrap; background:$soft; color:$muted }
& .chip.good { background:$good-bg; color:$good }
& .chip.bad { background:$bad-bg; color:$bad; font-weight:600 }
& .chip.busy { background:$busy-bg; color:$busy }
& .chip.idle { background:$idle-bg; color:$idle }
& .note { margin:.4em 0; padding:.35em .7em; border-left:3px solid $line; background:$soft }
& .note.bad { border-color:$bad; background:$bad-bg; color:$fg }
& .note.idle { border-color:$idle; background:$idle-bg; color:$fg }
& .scroll { overflow-x:auto; max-width:100%; container-type:inline-size }
& table { display:table; width:100%; margin:0; border:0; border-collapse:collapse; border-spacing:0; font-size:1em;
  table-layout:auto; background:$bg; color:$fg }
& table.fixed { table-layout:fixed }
& tr, & tbody tr:nth-child(n), & tbody tr:nth-child(n):hover { background:transparent; color:$fg; border:0 }
& tbody tr.row:nth-child(n):hover { background:$soft }
& tr td, & tr th { padding:.25em .45em; border:0; border-top:1px solid $line; text-align:left; vertical-align:top;
  white-space:normal; max-width:none; line-height:1.45; font-weight:400; color:inherit; background:transparent }
& tr th { border-top:0; color:$muted; white-space:nowrap; vertical-align:bottom }
& tr td.num, & tr th.num { text-align:right; white-space:nowrap }
& tr td.num.cut { padding-left:.2em }
& tr.why td { border-top:0; padding:0 }
& tr.why div { overflow-wrap:anywhere; position:sticky; left:0; width:fit-content; max-width:min(100%,100cqi);
  padding:0 .45em .35em 7.85em }
& tr.why div.small { padding-left:8.9em }
& table.fixed td { overflow-wrap:anywhere }
& td.cut, & th.cut { overflow:hidden; text-overflow:ellipsis; white-space:nowrap }
& b.epoch { font-size:1.05em }
& .level { display:block; height:3px; margin-top:2px; background:$track; border-radius:2px; overflow:hidden }
& .level.alone { height:6px; margin-top:.5em }
& .level i { display:block; height:100%; background:$bar }
& .strip { display:flex; align-items:flex-end; gap:1px; height:18px; margin-top:1px; max-width:100% }
& .strip i { flex:0 1 14px; min-width:1px; background:$bar; border-radius:1px 1px 0 0 }
& .strip.many { gap:0 }
& .strip.many i { border-right:1px solid $bg }
& .strip i.slow { background:$fg }
& .strip i.writing { background:transparent; border:1px dashed $busy }
& .strip i.written { background:$busy }
& .strip i.bad { background:repeating-linear-gradient(45deg,$bad 0 2px,$bg 2px 4px); outline:1px solid $bad }
& .small { font-size:.88em }
& details { display:block; margin:.5em 0 0; padding:0; border:0; background:transparent }
& summary { display:block; cursor:pointer; list-style:none; padding:.15em 0; margin:0; color:$fg; font-weight:400 }
& summary::-webkit-details-marker { display:none }
& summary::marker { content:"" }
& summary::before { content:"▸"; display:inline-block; width:1em; color:$muted }
& details[open] > summary::before { content:"▾" }
& summary:hover { background:$soft }
& summary:focus-visible { outline:2px solid $busy; outline-offset:-1px }
& .item { margin:.8em 0 0; border-top:1px solid $line; padding-top:.5em }
& > .item:nth-child(2) { margin-top:0; border-top:0; padding-top:0 }
& .item > summary { font-size:1em }
& .tree { min-width:44em }
& .tree details { margin:0 }
& .tree summary, & .leaf, & .heads { display:grid; align-items:baseline; column-gap:.7em;
  grid-template-columns:minmax(10em,1fr) 6em 10em 9em 5em 7.5em; padding:.12em .2em }
& .tree details > summary::before, & .tree details[open] > summary::before { content:none }
& .heads { color:$muted; border-bottom:1px solid $line }
& .tree summary .name::before { content:"▸"; display:inline-block; width:1.1em; color:$muted }
& .tree details[open] > summary .name::before { content:"▾" }
& .leaf .name { padding-left:1.1em }
& .leaf:hover { background:$soft }
& .name { min-width:0; overflow-wrap:anywhere }
& .within { margin-left:.45em; padding-left:.75em; border-left:1px solid $line }
& .two { grid-column:span 2; overflow:hidden; text-overflow:ellipsis; white-space:nowrap }
& .three { grid-column:span 3 }
& .end { text-align:right; white-space:nowrap }
& .share { display:flex; align-items:center; gap:.4em }
& .share .level { flex:1; margin:0; height:6px }
& .share b { width:3.4em; text-align:right; font-weight:400; white-space:nowrap }
& .thumb { display:inline-block; width:22px; height:14px; margin-right:.45em; vertical-align:-2px;
  background-size:100% 100% }
& .cards { display:flex; flex-wrap:wrap; gap:.8em; margin:.3em 0 0 }
& .card { border:1px solid $line; border-radius:5px; padding:.5em .7em; max-width:26em }
& .card svg { display:block; margin:.4em 0; max-width:100%; height:auto }
& .keys { display:flex; flex-wrap:wrap; gap:.15em .7em; max-width:24em }
& .keys.wide { max-width:none }
& .swatch { display:inline-block; min-width:1.7em; padding:0 .25em; margin-right:.35em; border-radius:2px;
  text-align:center; color:$ink; font-size:.88em }
& .keys > span { white-space:nowrap }
& .keys > .swatch { margin-right:0 }
& svg .hist { fill:$bar }
& svg .axis { stroke:$muted; stroke-width:1; fill:none }
& svg .edge { stroke:$bg; stroke-width:1; fill:none }
& svg .frame { stroke:$muted; stroke-width:1; fill:none }
& svg .blank { fill:$track }
& svg .ink { fill:$ink; font:9px system-ui,"DejaVu Sans",sans-serif; text-anchor:middle; dominant-baseline:central }
& svg text.side { fill:$muted; font:10px system-ui,"DejaVu Sans",sans-serif }
& dl { display:grid; grid-template-columns:fit-content(16em) minmax(0,1fr); gap:.1em 1em; margin:.2em 0; padding:0 }
& dt, & dd { margin:0; padding:0; font-weight:400; float:none; width:auto; min-width:0 }
& dt { color:$muted }
"""


def css() -> str:
    """The style sheet, without its element."""
    light, dark = _variables(LIGHT, "light"), _variables(DARK, "dark")
    root = f".{PREFIX}.{PREFIX}"
    return "".join(
        [
            f"{root}{{{light}}}",
            f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}",
            f"{','.join(f'{page} {root}' for page in _IS_LIGHT)}{{{light}}}",
            f"{','.join(f'{page} {root}' for page in _IS_DARK)}{{{dark}}}",
            _sheet(root),
        ]
    )


def node_colour(index: int) -> str:
    """A node's colour: neighbours differ much, and `ink` can be read on each."""
    # Steps of the golden angle never come round; the lightness alternates as not everybody sees hues.
    hue = (0.58 + index * 0.381966) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.67, 0.78, 0.72)[index % 3], 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _variables(theme: dict[str, str], scheme: str) -> str:
    return f"color-scheme:{scheme};" + ";".join(f"--{PREFIX}-{name}:{colour}" for name, colour in theme.items())


def _sheet(root: str) -> str:
    rules = []
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", _RULES):
        own = re.sub(r"\.(?=[a-z])", f".{PREFIX}-", selector).replace("&", root)
        body = re.sub(r"\$([a-z-]+)", rf"var(--{PREFIX}-\1)", body)
        rules.append(f"{' '.join(own.split())}{{{' '.join(body.split())}}}")
    return "".join(rules)
