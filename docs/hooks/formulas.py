"""Turns the formulas of a built page into MathML, which browsers draw without scripts or fonts from elsewhere."""

import html
import logging
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")

# What the extension arithmatex leaves in a page for each formula.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's HTML with every formula as MathML."""
    try:
        from latex2mathml.converter import convert
    except ModuleNotFoundError:
        log.info("latex2mathml is not installed: formulas stay in TeX")
        return content

    def as_mathml(found: re.Match[str]) -> str:
        tag, bracket, tex = found.groups()
        # The converter does not know the command \arg.
        tex = html.unescape(tex).strip().replace(r"\arg", r"\operatorname{arg}")
        try:
            formula = convert(tex, display="block" if bracket == "[" else "inline")
        except Exception as problem:
            log.warning("%s: a formula cannot be read (%s): %s", page.file.src_uri, problem, tex)
            return found.group()
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(as_mathml, content)
