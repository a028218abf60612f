"""Puts every page of results into the navigation, so that a study's page appears by being written."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a section with the pages of `results/`, if there are any."""
    pages = sorted(path.name for path in Path(config.docs_dir, "results").glob("*.md"))
    if pages and config.nav is not None:
        config.nav.insert(-1, {"Results": [f"results/{name}" for name in pages]})
    return config
