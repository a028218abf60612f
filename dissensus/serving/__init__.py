"""An exported file behind HTTP: predictions, how sure they are, and whether an input is unlike what the ensemble knows.

Nothing here loads torch: a server needs the file, onnxruntime and numpy. `serve(Settings(...))` listens, `make_app(Settings(...))`
is the application alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dissensus.serving.app import make_app
    from dissensus.serving.server import serve
    from dissensus.serving.service import Settings

__all__ = ["Settings", "make_app", "serve"]

_HOMES = {"Settings": "service", "make_app": "app", "serve": "server"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"dissensus.serving.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dissensus.serving' has no attribute {name!r}")
