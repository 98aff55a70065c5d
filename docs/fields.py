"""Has the reference show the fields of a class as a list: `name: text` in its docstring."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from griffe import Class, Extension, Function

FIELD = re.compile(r"(\w+): ")


def indented(lines: Iterable[str], names: set[str]) -> Iterator[str]:
    """Indents lines as items of a section: those that begin with a name by four columns, others by eight."""
    for line in lines:
        found = FIELD.match(line)
        yield f"    {line}" if found and found[1] in names else f"        {line.strip()}"


def with_attributes(text: str, names: set[str]) -> str:
    """Returns a docstring with its paragraphs of `name: text` as a section `Attributes:` of Google's format.

    Args:
        text: a docstring, without indentation.
        names: of the attributes, properties and parameters of the class; paragraphs that begin with one change.
    """
    paragraphs = text.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        found = FIELD.match(paragraph)
        if found and found[1] in names:
            paragraphs[number] = "\n".join(["Attributes:", *indented(paragraph.split("\n"), names)])
    return "\n\n".join(paragraphs)


class Fields(Extension):
    """Changes the docstrings of classes when they are read."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Changes the docstring of a class."""
        if cls.docstring:
            names = set(cls.members)
            init = cls.members.get("__init__")
            if isinstance(init, Function):
                names |= {parameter.name for parameter in init.parameters}
            cls.docstring.value = with_attributes(cls.docstring.value, names)
