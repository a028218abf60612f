"""Text, tables and figures in, one self-contained HTML page out.

Figures stand in it as SVG. It follows the reader's light or dark setting, tables scroll in their own box where the screen is narrow, and
it prints. A table of many inputs can be searched and sorted by a short script. All text is escaped.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import StringIO
from itertools import count, groupby
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    import matplotlib.figure

# Colours of figures that the style sheet gives a second value, for dark pages: those of `plots`, and the greys that
# matplotlib draws grids and frames with.
_NAMED_COLOURS = {
    "#000000": "ink",
    "#ffffff": "paper",
    "#555555": "note",
    "#b0b0b0": "grid",
    "#bbbbbb": "grid",
    "#cccccc": "grid",
    "#0072b2": "blue",
    "#d55e00": "vermilion",
    "#009e73": "green",
    "#cc79a7": "pink",
    "#e69f00": "orange",
    "#56b4e9": "sky",
}

# A space that is narrow and does not break.
GROUP = "\u202f"


class Text:
    """Paragraphs of plain text."""

    def __init__(self, *paragraphs: str) -> None:
        self.paragraphs = paragraphs


@dataclass(frozen=True)
class Table:
    """Rows under named columns; columns of numbers are aligned to the right.

    Attributes:
        columns: Names of the columns.
        rows: Cells, row by row: text, numbers, booleans, or None for a cell without a value.
        caption: What the table shows.
        best: Row and column of cells that stand out, such as the best value of a column.
        main: Numbers of rows that stand out.
        search: Whether readers can search and sort it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    best: Collection[tuple[int, int]] = ()
    main: Collection[int] = ()
    search: bool = False

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.columns):
                has = f"has {len(self.columns)} columns; row {number} has {len(row)} cells"
                raise ValueError(f"A table {has}. Put None where there is no value.")


@dataclass(frozen=True)
class Picture:
    """A figure, shown as SVG.

    Attributes:
        figure: What to show; it is drawn when the page is written.
        alt: What the figure shows, for readers who cannot see it.
        caption: A line under the figure.
    """

    figure: "matplotlib.figure.Figure"
    alt: str
    caption: str = ""

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError("`alt` must say what the figure shows, for readers who cannot see it; it is empty.")


@dataclass(frozen=True)
class Headline:
    """A number that a page begins with.

    Attributes:
        label: What it is.
        value: The number.
        note: A few words under it.
    """

    label: str
    value: str
    note: str = ""


Block: TypeAlias = Text | Table | Picture


class Section:
    """A titled part of a page; pictures that follow each other stand side by side where there is room."""

    def __init__(self, title: str, *blocks: Block) -> None:
        if others := [type(block).__name__ for block in blocks if not isinstance(block, Text | Table | Picture)]:
            raise ValueError(f"A section holds Text, Table and Picture; got {others[0]} in {title!r}. Use Text(...).")
        self.title, self.blocks = title, blocks


def write_page(
    path: Path | str,
    title: str,
    sections: Sequence[Section],
    lead: str = "",
    *,
    subtitle: str = "",
    headlines: Sequence[Headline] = (),
    remarks: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML page; folders on the way to it are made.

    Args:
        path: The file to write.
        title: Title of the page.
        sections: Its parts; a table of contents is added when there are more than three.
        lead: A paragraph between title and sections that says the main thing.
        subtitle: A line under the title, such as data and date.
        headlines: The few numbers that matter most, in large type.
        remarks: What to keep in mind when reading, each in a box.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> section = Section("Result", Text("99 % < 100 %"))
        >>> page = write_page(Path(tempfile.mkdtemp()) / "page.html", "Digits", [section])
        >>> "<p>99 % &lt; 100 %</p>" in page.read_text()
        True
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"`path` must name a file; {target} is a folder. Add a file name, such as report.html.")
    top = f"{_line('subtitle', subtitle)}{_headlines(headlines)}{_line('lead', lead)}"
    page = _page(title, top + "".join(_line("remark", text) for text in remarks), sections)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def cell_text(value: object) -> str:
    """Return a table cell as text: floats with four significant digits, a dash for None.

    Example:
        >>> [cell_text(value) for value in (0.98, 12.34567, 1e-7, 42, None, True, "MLP")]
        ['0.9800', '12.35', '1.000e-07', '42', '–', 'yes', 'MLP']
        >>> cell_text(123456.7) == f"123{GROUP}457"
        True
    """
    if isinstance(value, Tensor):
        value = value.item()
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Real) or isinstance(value, Integral):
        return str(value)
    number = float(value)
    if 1e4 <= abs(number) < 1e9:
        return f"{number:,.0f}".replace(",", GROUP)
    return f"{number:#.4g}".removesuffix(".").replace("inf", "∞")


def _page(title: str, top: str, sections: Sequence[Section]) -> str:
    figure_numbers = count(1)
    blocks = [block for section in sections for block in section.blocks]
    searched = any(isinstance(block, Table) and block.search for block in blocks)
    script = f"<script>\n{_file('page.js')}</script>\n" if searched else ""
    body = contents = ""
    for number, section in enumerate(sections, start=1):
        name = escape(section.title)
        contents += f'<li><a href="#section-{number}">{name}</a></li>\n'
        body += (
            f'<section id="section-{number}" aria-labelledby="title-{number}">\n<h2 id="title-{number}">{name}</h2>\n'
            f"{''.join(_blocks(section.blocks, figure_numbers))}</section>\n"
        )
    listed = f'<nav aria-label="Contents">\n<ol>\n{contents}</ol>\n</nav>\n' if len(sections) > 3 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # An empty icon of its own keeps browsers from asking a server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n{top}</header>\n{listed}<main>\n{body}</main>\n{script}</body>\n</html>\n"
    )


def _line(kind: str, text: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>\n' if text else ""


def _headlines(headlines: Sequence[Headline]) -> str:
    items = ""
    for one in headlines:
        note = f"<span>{escape(one.note)}</span>" if one.note else ""
        items += f"<div><dt>{escape(one.label)}</dt><dd><b>{escape(one.value)}</b>{note}</dd></div>\n"
    return f'<dl class="headlines">\n{items}</dl>\n' if items else ""


def _file(name: str) -> str:
    return files("dissensus").joinpath(name).read_text(encoding="utf-8")


def _blocks(blocks: Sequence[Block], figure_numbers: Iterator[int]) -> Iterator[str]:
    for pictures, group in groupby(blocks, key=lambda block: isinstance(block, Picture)):
        content = "".join(_block(block, figure_numbers) for block in group)
        yield f'<div class="pictures">\n{content}</div>\n' if pictures else content


def _block(block: Block, figure_numbers: Iterator[int]) -> str:
    if isinstance(block, Text):
        return "".join(f"<p>{escape(paragraph)}</p>\n" for paragraph in block.paragraphs)
    return _table(block) if isinstance(block, Table) else _picture(block, next(figure_numbers))


def _table(table: Table) -> str:
    kinds = [_kind([row[place] for row in table.rows]) for place in range(len(table.columns))]
    heads = zip(table.columns, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in heads)
    rows = "".join(_row(table, number, kinds) for number in range(len(table.rows)))
    caption = f"<caption><span>{escape(table.caption)}</span></caption>\n" if table.caption else ""
    label = escape(table.caption or "Table: " + ", ".join(table.columns))
    # Focusable, so that it can be scrolled without a mouse.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">\n'
        f"<table{' data-search' if table.search else ''}>\n{caption}"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )


def _row(table: Table, number: int, kinds: Sequence[str]) -> str:
    """Return one row; a first cell with text is the row's heading."""
    cells = ""
    for place, (value, kind) in enumerate(zip(table.rows[number], kinds, strict=True)):
        text = escape(cell_text(value))
        text = f"<strong>{text}</strong>" if (number, place) in table.best else text
        heading = place == 0 and isinstance(value, str)
        cells += f'<th scope="row">{text}</th>' if heading else f"<td{kind}>{text}</td>"
    main = ' class="main"' if number in table.main else ""
    return f"<tr{main}>{cells}</tr>\n"


def _kind(values: Sequence[object]) -> str:
    """Return the class of a column's cells: "number" where all that there are are numbers."""
    present = [value for value in values if value is not None]
    numbers = all(isinstance(value, Real | Tensor) and not isinstance(value, bool) for value in present)
    return ' class="number"' if present and numbers else ""


def _picture(picture: Picture, number: int) -> str:
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>\n" if picture.caption else ""
    svg = _with_prefix(_svg(picture.figure), f"figure-{number}-")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(picture.alt)}" ', 1)
    return f"<figure>\n{svg}\n{caption}</figure>\n"


def _svg(figure: "matplotlib.figure.Figure") -> str:
    """Return a figure as an SVG element: no prolog, no metadata, no comments, no style rules of its own."""
    from matplotlib import rc_context

    drawing = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # With a fixed salt the same figure gives the same page; letters that stay text can be found and copied.
    with rc_context({"svg.hashsalt": "dissensus", "svg.fonttype": "none"}):
        figure.savefig(drawing, format="svg", dpi=150, metadata=nothing)
    svg = _with_hover(_with_named_colours(drawing.getvalue()))
    svg = re.sub(r"<!--.*?-->\s*|<style.*?</style>\s*|<metadata.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Namespaces are known to HTML; declaring them would be the page's only mention of another host.
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :]).strip()


def _with_hover(svg: str) -> str:
    """Give the points of lines that `plots.hover` named a text that browsers show above them."""

    def named(group: re.Match[str]) -> str:
        texts = iter(group[1].split("|"))
        if len(re.findall("<use [^>]*/>", group[2])) != group[1].count("|") + 1:
            return f"<g>{group[2]}"  # a point lies outside of the axes and was not drawn
        return "<g>" + re.sub("(<use [^>]*)/>", lambda use: f"{use[1]}><title>{next(texts)}</title></use>", group[2])

    return re.sub(r'<g id="hover:([^"]*)">(.*?</g>\s*</g>)', named, svg, flags=re.DOTALL)


def _with_named_colours(svg: str) -> str:
    """Let the page's style sheet say what the colours are that it knows; others stay as they are."""

    def rename(style: re.Match[str]) -> str:
        return re.sub(rf"({'|'.join(_NAMED_COLOURS)})\b", lambda c: f"var(--{_NAMED_COLOURS[c[0]]}, {c[0]})", style[0])

    return re.sub(r'(?<= style=")[^"]*', rename, svg)


def _with_prefix(svg: str, prefix: str) -> str:
    """Put a prefix before every identifier and reference, so that figures on one page do not mix."""

    def rename(tag: re.Match[str]) -> str:
        return re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{prefix}", tag[0])

    return re.sub(r"<[^<>]*>", rename, svg)
