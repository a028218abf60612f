"""Pages: what they contain, that nothing in them is markup by accident, and that they need nothing else."""

import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from dissensus.html import _NAMED_COLOURS, Picture, Section, Table, Text, cell_text, write_page
from dissensus.plots import COLOURS

NASTY = """<script>alert("1")</script> & 'it' <!-- --> </style></svg> url(#a) id="b" $x$"""
VOID = {"meta", "link", "br", "img"}


class Outline(HTMLParser):
    """Elements and text of a page, as a browser would see them; refuses tags that are not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.texts.append((self.open[-1], data))

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def text_of(self, tag):
        return [text for name, text in self.texts if name == tag]


def figure(title="title", width=4.0):
    """A figure with clip paths, markers, text and an image: all that an SVG can refer to by identifier."""
    drawing = Figure(figsize=(width, 3))
    left, right = drawing.subplots(1, 2)
    left.plot([0, 1, 2], [0.1, 0.5, 0.2], "o-", label="line")
    left.legend()
    left.set_title(title)
    right.imshow(np.arange(12.0).reshape(3, 4))
    return drawing


def read(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path):
    def write(*sections, title="A page", lead=""):
        return read(write_page(tmp_path / "page.html", title, sections, lead))

    return write


def test_a_page_has_language_title_charset_and_a_viewport_that_can_be_zoomed(page):
    outline = Outline(page(Section("Results", Text("Fine.")), title="Digits", lead="In short."))
    assert outline.all("html") == [{"lang": "en"}]
    assert outline.text_of("title") == outline.text_of("h1") == ["Digits"]
    assert {"charset": "utf-8"} in outline.all("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in outline.all("meta")
    assert outline.text_of("h2") == ["Results"]
    assert outline.text_of("p") == ["In short.", "Fine."]


def test_nothing_that_is_given_becomes_markup(page):
    text = page(
        Section(
            NASTY,
            Text(NASTY),
            Table([NASTY, "n"], [[NASTY, 1.0]], caption=NASTY),
            Picture(figure(NASTY), alt=NASTY, caption=NASTY),
        ),
        title=NASTY,
        lead=NASTY,
    )
    outline = Outline(text)
    assert outline.all("script") == []
    for tag in ("title", "h1", "h2", "p", "th", "span", "figcaption"):
        assert NASTY in outline.text_of(tag), tag
    assert outline.all("svg")[0]["aria-label"] == NASTY
    assert outline.all("div")[0]["aria-label"] == NASTY


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1))
def test_any_text_comes_back_from_a_parsed_page(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("page") / "page.html"
    outline = Outline(read(write_page(path, "t", [Section("s", Text("begin" + text + "end"))])))
    assert outline.text_of("p") == ["begin" + text + "end"]


def test_a_page_refers_to_nothing_outside_itself(page):
    text = page(*(Section(f"Part {n}", Picture(figure(), alt="lines")) for n in range(5)))
    outline = Outline(text)
    assert "http" not in text
    assert outline.all("script") == []
    for tag, attrs in outline.elements:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", text)


def test_several_figures_on_a_page_share_no_identifier_and_every_reference_is_kept(page):
    same = figure()
    text = page(
        Section("One", Picture(same, alt="a"), Picture(same, alt="b")), Section("Two", Picture(figure(), alt="c"))
    )
    outline = Outline(text)
    ids = [attrs["id"] for _, attrs in outline.elements if "id" in attrs]
    assert len(outline.all("svg")) == 3
    assert len(ids) == len(set(ids)) > 30
    references = re.findall(r'(?:url\(|href=")#([^")]+)', text)
    assert len(references) > 30
    assert set(references) <= set(ids)


def test_figures_are_well_formed_and_keep_their_text(page):
    text = page(Section("One", Picture(figure("Loss & time"), alt="a figure")))
    (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "a figure"
    assert "Loss & time" in [element.text for element in root.iter("text")]
    (image,) = root.iter("image")
    assert image.attrib["{x}href"].startswith("data:image/png;base64,")


def test_text_in_a_figure_that_looks_like_a_reference_is_left_alone(page):
    outline = Outline(page(Section("One", Picture(figure('url(#a) id="b"'), alt="a figure"))))
    assert 'url(#a) id="b"' in outline.text_of("text")


def test_the_same_figures_give_the_same_page_and_leave_matplotlib_as_it_was(page):
    before = dict(mpl.rcParams)
    first, second = (page(Section("One", Picture(figure(), alt="a"))) for _ in range(2))
    assert first == second
    assert dict(mpl.rcParams) == before


def test_pictures_in_a_row_share_a_box_and_text_between_them_parts_it(page):
    first, second, third = (Picture(figure(), alt=name) for name in "abc")
    text = page(Section("One", first, second, Text("Between."), third))
    boxes = text.split('<div class="pictures">')[1:]
    assert [box.count("<figure>") for box in boxes] == [2, 1]


@pytest.mark.parametrize(("sections", "links"), [(3, 0), (4, 4)])
def test_more_than_three_sections_get_a_table_of_contents(page, sections, links):
    outline = Outline(page(*(Section(f"Part {n}") for n in range(sections))))
    targets = [attrs["href"].removeprefix("#") for attrs in outline.all("a")]
    assert len(targets) == links
    assert targets == [attrs["id"] for attrs in outline.all("section")][:links]
    assert outline.text_of("a") == [f"Part {n}" for n in range(links)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98765432, "0.9877"),
        (1.0, "1.000"),
        (0.0, "0.000"),
        (-12.5, "-12.50"),
        (1234.4, "1234"),
        (98765.4, "98\u202f765"),
        (2.5e9, "2.500e+09"),
        (0.00012345678, "0.0001235"),
        (float("nan"), "nan"),
        (float("-inf"), "-∞"),
        (np.float32(0.5), "0.5000"),
        (np.int64(2017), "2017"),
        (torch.tensor(0.25), "0.2500"),
        (torch.tensor(3), "3"),
        (123456, "123456"),
        (True, "yes"),
        (None, "–"),
        ("0.98765432", "0.98765432"),
    ],
)
def test_cells_show_four_significant_digits_of_floats_and_all_of_the_rest(value, text):
    assert cell_text(value) == text


def test_tables_have_a_caption_row_headings_and_numbers_to_the_right(page):
    table = Table(["model", "ECE", "note"], [["MLP", 0.5, "a"], ["CNN", None, 2]], caption="Calibration")
    outline = Outline(page(Section("One", table)))
    assert outline.text_of("span") == ["Calibration"]
    heads = [attrs for attrs in outline.all("th") if attrs["scope"] == "col"]
    assert [attrs.get("class") for attrs in heads] == [None, "number", None]
    assert outline.all("td") == [{"class": "number"}, {}, {"class": "number"}, {}]
    assert outline.text_of("th") == ["model", "ECE", "note", "MLP", "CNN"]
    assert outline.text_of("td") == ["0.5000", "a", "–", "2"]
    (box,) = outline.all("div")
    assert box == {"class": "scroll", "role": "region", "tabindex": "0", "aria-label": "Calibration"}


def test_folders_on_the_way_to_a_page_are_made(tmp_path):
    path = write_page(str(tmp_path / "a" / "b.html"), "t", [])
    assert path == tmp_path / "a" / "b.html"
    assert path.is_file()


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns; row 2 has 1"):
        Table(["a", "b"], [[1, 2], [3]])


def test_a_picture_without_a_description_is_refused():
    with pytest.raises(ValueError, match="alt"):
        Picture(Figure(), alt=" ")


def test_a_section_of_something_else_is_refused():
    # Where shapes and types are checked at every call, that check speaks first, with an error of its own.
    with pytest.raises((ValueError, TypeError), match="Text"):
        Section("One", "text")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        write_page(tmp_path, "t", [])


def test_a_figure_that_cannot_be_drawn_leaves_the_old_page_alone(tmp_path):
    path = tmp_path / "page.html"
    write_page(path, "old", [])
    broken = figure("$\\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        write_page(path, "new", [Section("One", Picture(broken, alt="a"))])
    assert Outline(read(path)).text_of("h1") == ["old"]


def luminance(colour):
    """Relative luminance by the definition of WCAG 2."""
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    channels = np.array([int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_and_white_is_21():
    assert contrast("#000", "#ffffff") == pytest.approx(21)


def colours_of(scheme):
    style = files("dissensus").joinpath("page.css").read_text()
    light, dark = re.findall(r":root\s*\{(.*?)\}", style, flags=re.DOTALL)
    return dict(re.findall(r"--(\w+):\s*(#\w+)", light if scheme == "light" else dark))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        *((ink, paper) for ink in ("text", "quiet", "accent") for paper in ("page", "soft")),
        *((ink, "paper") for ink in ("ink", "note", "quiet")),
    ],
)
def test_text_can_be_read_in_light_and_dark(scheme, ink, paper):
    colours = colours_of(scheme)
    assert contrast(colours[ink], colours[paper]) >= 4.5


@pytest.mark.parametrize("name", sorted(set(_NAMED_COLOURS.values()) - {"paper", "grid"}))
def test_lines_of_figures_stand_out_on_dark_as_well(name):
    dark = colours_of("dark")
    assert contrast(dark[name], dark["paper"]) >= 4.5


def test_light_pages_show_figures_in_the_colours_they_were_drawn_in():
    light = colours_of("light")
    drawn = {name: light[name] for name in _NAMED_COLOURS.values() if name != "grid"}
    assert {colour: name for name, colour in drawn.items()}.items() <= _NAMED_COLOURS.items()
    assert {colour.lower() for colour in COLOURS} <= set(_NAMED_COLOURS)


def test_figures_take_their_colours_from_the_page_and_images_keep_theirs(tmp_path):
    drawing = Figure(figsize=(3, 2))
    left, right = drawing.subplots(1, 2)
    left.plot([0, 1], color=COLOURS[0])
    left.plot([1, 0], color="#123456")
    left.set_title("#0072b2 is not a style")
    right.imshow(np.zeros((2, 2, 3)))
    page = write_page(tmp_path / "page.html", "t", [Section("s", Picture(drawing, "two lines"))]).read_text()
    assert "stroke: var(--blue, #0072b2)" in page
    assert "stroke: #123456" in page
    assert "#0072b2 is not a style" in page
    assert "fill: var(--paper, #ffffff)" in page
    assert "filter" not in page
    assert len(re.findall("<image ", page)) == 1


def test_the_style_sheet_ships_with_the_package():
    assert Path(str(files("dissensus").joinpath("page.css"))).is_file()
