"""Docstrings as Markdown: the few marks of reStructuredText that the code uses, translated."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc):`~?([^`]+)`")
_LITERAL = re.compile(r"(\w|\)|^)::\n\n(?=[ ]{4})", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes each docstring once, when it was read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Translate roles and literal blocks; leave out parameters that are not for users."""
        if isinstance(obj, griffe.Function):
            for name in [each.name for each in obj.parameters if each.name.startswith("_")]:
                del obj.parameters[name]
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub(lambda m: f"{m[1]}{':' * bool(m[1])}\n\n", text)
