"""An HTML page that needs nothing beside it: style, figures and pictures are inside. Light or dark, wide or narrow."""

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #767676; --good: #1a7f4b; --bad: #c0392b; --band: #8881; }
@media (prefers-color-scheme: dark) { :root { --soft: #a0a0a0; --good: #4cc38a; --bad: #ff7b6b; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { line-height: 1.2; margin: 1.5rem 0 .5rem; } h2 { margin: 2.5rem 0 .5rem; } h3 { margin: 1.5rem 0 .25rem; }
p { max-width: 44rem; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
code { background: var(--band); padding: .1em .3em; border-radius: .25em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } .left { text-align: left; } tr.best td { font-weight: 600; background: var(--band); }
.row { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.pictures { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); }
figure { margin: 0; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font-family: inherit !important; }
.pictures img { width: 100%; border-radius: .4rem; display: block; } .tiny { image-rendering: pixelated; }
.right { color: var(--good); } .wrong { color: var(--bad); }
.claim { border-left: .25rem solid var(--good); padding: .25rem 1rem; background: var(--band); }
.claim.broken { border-color: var(--bad); }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The page, from parts that are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{CSS}</style>\n</head>\n'
        f"<body>\n<h1>{text(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def text(anything: object) -> str:
    return html.escape(str(anything))


def element(name: str, inside: str, css: str = "") -> str:
    """An element around HTML."""
    return f'<{name} class="{css}">{inside}</{name}>' if css else f"<{name}>{inside}</{name}>"


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, best: Sequence[int] = ()
) -> str:
    """A table whose first `left` columns are words; rows by number in `best` stand out."""
    sides = ["left"] * left + [""] * (len(heads) - left)
    head = "".join(element("th", text(cell), side) for cell, side in zip(heads, sides, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(element("td", text(cell), side) for cell, side in zip(row, sides, strict=True))
        lines.append(element("tr", cells, "best" if number in best else ""))
    inside = element("tr", head) + "\n".join(lines)
    return element("div", element("table", inside), "wide") + element("p", text(caption), "soft")


def drawing(figure: "Figure", description: str) -> str:
    """A figure as SVG whose lettering takes on the colour of the page's."""
    from bitgraft.paper.figures import rendered

    svg = rendered(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # names of groups, which several figures on one page would repeat
    svg = re.sub(
        r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return element("figure", svg.replace("<svg ", f'<svg role="img" aria-label="{text(description)}" ', 1))


def picture(image: Image.Image, caption: str, most: int = 128) -> str:
    """A picture, made smaller where it is large, with HTML below it."""
    small = image.copy()
    small.thumbnail((most, most))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    css = ' class="tiny"' if small.width < most // 2 else ""
    return element("figure", f'<img{css} alt="" src="data:image/png;base64,{data}">' + element("figcaption", caption))
