"""Tables set in Markdown, LaTeX, CSV and HTML."""

import csv
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bitgraft.paper.report.table import Cell, Line, Table

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "✓": r"\ding{51}",
    "×": r"$\times$",
    "–": "--",
}
STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 88rem; padding: 0 1rem; color: #1b1b1b;
  background: #fff }
h1 { font-size: 1.5rem } figure { margin: 2rem 0 } img { max-width: 100%; height: auto }
.table { overflow-x: auto; margin: 2rem 0 } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
caption, figcaption { text-align: left; font-weight: 600; padding-bottom: .5rem }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap } th:first-child { text-align: left }
thead th { border-top: 2px solid; border-bottom: 1px solid } tbody tr:last-child > * { border-bottom: 2px solid }
tbody th { font-weight: 400 } small, .notes { color: #555; font-size: .85rem }
.notes { margin: .4rem 0 0; padding-left: 1.2rem }"""


def markdown(table: Table) -> str:
    """Padded, so that it reads well as it is."""
    heads = [_md(name) for name in (table.corner, *table.headings)]
    rows = [[_md(line.title), *map(_md_cell, line.cells)] for line in table.lines]
    widths = [max(3, *map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = [f":{'-' * (width - 1)}" if place == 0 else f"{'-' * (width - 1)}:" for place, width in enumerate(widths)]
    lines = [f"**{_md(table.caption)}**", "", *(_bar(row, widths) for row in [heads, rule, *rows])]
    return "\n".join([*lines, *(["", *(f"- {_md(note)}" for note in table.notes)] if table.notes else [])])


def latex(table: Table) -> str:
    """Needs the package pifont where something is learned, as the paper does."""
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{_tex('. '.join([table.caption, *(note.rstrip('.') for note in table.notes)]))}.}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{l{'r' * len(table.headings)}}}",
            r"\hline",
            " & ".join(map(_tex, [table.corner, *table.headings])) + r" \\",
            r"\hline",
            *(" & ".join([_tex(line.title), *map(_tex_cell, line.cells)]) + r" \\" for line in table.lines),
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def comma_separated(table: Table) -> str:
    """Numbers without marks; spread and number of seeds in columns of their own, where there is any spread."""
    spread = [any(line.cells[i].sd is not None for line in table.lines) for i in range(len(table.headings))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [[name, *[f"{name} sd", f"{name} n"] * wide] for name, wide in zip(table.headings, spread, strict=True)]
    writer.writerow([table.corner, *(name for some in heads for name in some)])
    for line in table.lines:
        writer.writerow(
            [line.title, *(value for cell, w in zip(line.cells, spread, strict=True) for value in _csv(cell, w))]
        )
    return out.getvalue()


def html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [table.corner, *table.headings])
    body = "\n".join(_html_line(line) for line in table.lines)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="table"><table id="{escape(table.name)}">\n<caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + "</div>"
    )


def markdown_page(title: str, tables: Iterable[Table], figures: Iterable[tuple[Path, str]], origin: str) -> str:
    shown = [f"![{_md(caption)}]({file.name})" for file, caption in figures]
    return "\n\n".join([f"# {_md(title)}", *map(markdown, tables), *shown, _md(origin)]) + "\n"


def html_page(title: str, tables: Iterable[Table], figures: Iterable[tuple[Path, str]], origin: str) -> str:
    shown = [
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<img src="{escape(file.name)}" alt="{escape(caption)}"></figure>'
        for file, caption in figures
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>\n{STYLE}\n</style></head><body>\n<h1>{escape(title)}</h1>",
            *map(html, tables),
            *shown,
            f'<p class="notes">{escape(origin)}</p>',
            "</body></html>\n",
        ]
    )


def latex_page(tables: Iterable[Table]) -> str:
    return "% \\usepackage{pifont} for \\ding; \\input this file\n" + "\n\n".join(map(latex, tables)) + "\n"


def _md(text: str) -> str:
    for sign in "\\|*_<>`[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _bar(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"


def _md_cell(cell: Cell) -> str:
    text = _md(cell.text)
    marked = {"best": f"**{text}**", "second": f"<u>{text}</u>", None: text}[cell.mark]
    return marked + cell.spread


def _tex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def _tex_cell(cell: Cell) -> str:
    text = _tex(cell.text)
    marked = {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}", None: text}[cell.mark]
    return marked + _tex(cell.spread)


def _csv(cell: Cell, wide: bool) -> list[str]:
    sd = "" if cell.sd is None else f"{cell.sd:.{len(cell.text.partition('.')[2])}f}"
    return [cell.text, *([sd, "" if cell.n is None else str(cell.n)] if wide else [])]


def _html_line(line: Line) -> str:
    cells = "".join(f"<td>{_html_cell(cell)}</td>" for cell in line.cells)
    return f'<tr><th scope="row">{escape(line.title)}</th>{cells}</tr>'


def _html_cell(cell: Cell) -> str:
    text = escape(cell.text)
    marked = {"best": f"<b>{text}</b>", "second": f"<u>{text}</u>", None: text}[cell.mark]
    return marked + (f"<small>{escape(cell.spread)}</small>" if cell.spread else "")
