"""Write docs/wire.md from the message classes, so that it cannot say anything else.

python docs/tools/wire_page.py              # writes the page; a test says when it is stale
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.inspect import Field, StructType, type_info

from asyncvmm._core import wire

PAGE = Path(__file__).parent.parent / "wire.md"

INTRODUCTION = """\
# Wire format

<!-- Written by docs/tools/wire_page.py from the classes in _core/wire.py; change those. -->

This is protocol version {version}. Both ends must speak the same one; an end that does not is told
so in the first packet, by a version number that every version can read.

A **packet** is one message of a Unix `SOCK_SEQPACKET` socket, of at most {packet:,} bytes. It holds
one MessagePack array of messages. A **message** is a MessagePack array: its tag, then its fields in
the order below; fields at the end that have a default may be missing. The packets of the handshake
({greetings}) hold one message each, not in an array, behind the
four bytes `{magic}` and the version as a big-endian 16-bit number; only a Rejected that comes after
a Welcome is a message like others.

Each packet carries at most one descriptor: that of the segment that its `Segment` message names.

What a peer sends is decoded into these types with these bounds; anything else ends its connection.
Whether a slot, a generation or a place in the pool may be *named* is checked after that, by both
cores. Nothing is ever unpickled.
"""


def page() -> str:
    """Return the text of the page."""
    greetings = [kind.__name__ for kind in get_args(wire.Greeting)]
    parts = [
        INTRODUCTION.format(
            version=wire.VERSION,
            packet=wire.PACKET_LIMIT,
            greetings=", ".join(greetings[:-1]) + f" and {greetings[-1]}",
            magic=wire.MAGIC.decode(),
        ),
        "## The handshake\n",
        *_messages(wire.Greeting),
        "## What an exporter says\n",
        *_messages(wire.FromExporter),
        "## What a consumer says\n",
        *(part for part in _messages(wire.FromConsumer) if not part.startswith("### Goodbye")),
        "`Goodbye` is the same in both directions.\n",
        "## What they are made of\n",
        *(_struct(kind) for kind in _parts()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _messages(union: Any) -> list[str]:
    return [_struct(kind) for kind in get_args(union)]


def _parts() -> list[type[msgspec.Struct]]:
    """Return the structures that messages are made of, in the order in which they are named."""
    found = list(get_args(wire.Message))
    for kind in found:  # it grows meanwhile
        info = type_info(kind)
        assert isinstance(info, StructType)
        for field in info.fields:
            found += [each for each in _mentioned(field.type) if each not in found]
    return found[len(get_args(wire.Message)) :]


def _mentioned(kind: Any) -> Iterator[type[msgspec.Struct]]:
    match kind:
        case StructType(cls=cls):
            yield cls
        case (
            msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item)
        ):
            yield from _mentioned(item)
        case msgspec.inspect.UnionType(types=kinds) | msgspec.inspect.TupleType(item_types=kinds):
            for each in kinds:
                yield from _mentioned(each)


def _struct(kind: type[msgspec.Struct]) -> str:
    info = type_info(kind)
    assert isinstance(info, StructType)
    title = f"### {kind.__name__}\n\n"
    if info.tag is not None:
        title += f"Tag {info.tag}. "
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    notes = _field_notes(kind)
    if not info.fields:
        return f"{title}{text} No fields.\n"
    rows = [
        f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {note} |"
        for field in info.fields
        for note in [notes.get(field.name, "")]
    ]
    head = "| field | type | default | |\n|---|---|---|---|\n"
    return f"{title}{text}\n\n{head}" + "\n".join(rows) + "\n"


def _field_notes(kind: type) -> dict[str, str]:
    """Return the strings that follow fields in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            notes[field.target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return notes


def _type(kind: Any) -> str:
    match kind:
        case msgspec.inspect.IntType(ge=low, le=high) if high is not None:
            return f"int, {low:,} to " + ("2^62" if high == 2**62 else f"{high:,}")
        case msgspec.inspect.IntType():
            return "int"
        case msgspec.inspect.FloatType(ge=low):
            return "float" + (f", at least {low:g}" if low is not None else "")
        case msgspec.inspect.BoolType():
            return "bool"
        case msgspec.inspect.NoneType():
            return "nil"
        case msgspec.inspect.StrType(max_length=most):
            return "text" + (f", at most {most:,} characters" if most else "")
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            if least and least == most:
                return f"{least} bytes"
            return "bytes" + (f", at most {most:,}" if most else "")
        case msgspec.inspect.ListType(item_type=item, max_length=most):
            return f"array of {_type(item)}" + (f", at most {most:,}" if most else "")
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"array of {_type(item)}"
        case msgspec.inspect.TupleType(item_types=items):
            return "array of " + " and ".join(_type(item) for item in items)
        case msgspec.inspect.UnionType(types=kinds):
            return " or ".join(_type(each) for each in kinds)
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
    raise TypeError(f"the page has no words for {kind!r}")


def _default(field: Field) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{value!r}`" if not isinstance(value, str | bytes) or value else "empty"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
