"""Lets the API pages read our docstrings as they are meant.

The reader of Google docstrings knows `Examples:` and takes our `Example:` for plain text, in which `>>>` is a quotation; and
it takes what stands before a colon in `Returns:` for a type, so we give it the type.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
RETURNS = re.compile(r"^(Returns:\n\s+)", re.MULTILINE)


class ReadOurDocstrings(griffe.Extension):
    """Changes docstrings while sources are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Take the docstring of a module, class, function or attribute in hand."""
        if obj.docstring is None:
            return
        text = EXAMPLE.sub("Examples:", obj.docstring.value)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            kind = str(obj.returns)
            text = RETURNS.sub(lambda found: f"{found.group()}{kind}: ", text)
        obj.docstring.value = text
