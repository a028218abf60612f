"""Puts every page of results into the navigation, so that a study's page appears by being written."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a section with the pages of `results/`, if there are any."""
    # The page for whom has read none of the others comes first.
    names = (path.name for path in Path(config.docs_dir, "results").glob("*.md"))
    pages = sorted(names, key=lambda name: (name != "claims.md", name))
    if pages and config.nav is not None:
        config.nav.insert(-1, {"Results": [f"results/{name}" for name in pages]})
    return config
