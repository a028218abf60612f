"""An exported file behind HTTP: predictions, how sure they are, and whether an input is unlike what the ensemble knows.

Nothing here loads torch: a server needs the file, onnxruntime and numpy. `serve(Settings(...))` listens, `make_app(Settings(...))`
is the application alone.
"""

from dissensus.serving.app import Settings, make_app
from dissensus.serving.server import serve

__all__ = ["Settings", "make_app", "serve"]
