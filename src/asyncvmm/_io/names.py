"""Where an exporter lives: from the name a user gives to a socket address.

Three kinds of names.  A *path* contains a slash (or is an ``os.PathLike``).  A bare *name* lives
in a private folder that only this user can enter.  An *abstract* name starts with ``@`` and has
no file; every user of the network namespace sees it, so only the uid check keeps others out.

:func:`check` only reads the text; :func:`resolve` asks the file system: call it in a worker
thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from typing import Literal

from asyncvmm._errors import AccessDeniedError, ArgumentError

ADDRESS_LIMIT = 107
"""Bytes of a Unix socket address: sun_path has 108, one of them the closing zero."""

LEAF_LIMIT = ADDRESS_LIMIT - len("/proc/self/fd/1048576/")
"""Bytes of the file's name where the path is longer than that: its folder is then reached through
a descriptor, whose number has up to seven digits (fs.nr_open is 1,048,576 unless raised)."""

_BARE_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_NAME_LIMIT = 200
"""Characters of a bare name: file names end at 255 bytes, and we add to it."""


@dataclass(frozen=True, slots=True)
class Address:
    """One place an exporter may live at, the same for whoever resolves the same name."""

    display: str
    """What the user wrote; for messages."""
    sockaddr: str
    """The absolute path, which may be longer than a socket address (see ``fitting``), or the
    abstract name with its zero."""
    kind: Literal["name", "path", "abstract"]


def check(name: str | os.PathLike[str]) -> str:
    """Return the text of a name; raise ArgumentError for what can be none.  Asks nobody."""
    text: object = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(
            f"an exporter's name is a non-empty str or path without NUL, got {name!r}"
        )
    kind = _kind(name)
    if kind == "abstract":
        size = len(os.fsencode(text))
        if not 2 <= size <= ADDRESS_LIMIT:
            raise ArgumentError(
                f"an abstract name has 2 to {ADDRESS_LIMIT} bytes with its @, got {size}: {text!r}"
            )
    elif kind == "path":
        if text.endswith("/") or os.path.basename(text) in {".", ".."}:
            raise ArgumentError(f"the path of an exporter names a file, got the folder {text!r}")
        if os.path.isabs(text):
            _check_length(os.path.abspath(text))
    elif not _BARE_NAME.fullmatch(text) or len(text) > _NAME_LIMIT or text in {".", ".."}:
        raise ArgumentError(
            f"a bare name has 1 to {_NAME_LIMIT} of the characters A-Z a-z 0-9 . _ - and is not "
            f"a dot, got {text!r}; a path needs a slash, an abstract name starts with @"
        )
    return text


def _kind(name: str | os.PathLike[str]) -> Literal["name", "path", "abstract"]:
    if not isinstance(name, str):
        return "path"
    if name.startswith("@"):
        return "abstract"
    return "path" if "/" in name else "name"


def resolve(name: str | os.PathLike[str]) -> Address:
    """Turn a name into an address, and make sure the private folder is private.

    A path may have any length: it is the same place for both ends, or refused.  Raises
    ArgumentError for what can be no name, and AccessDeniedError if somebody else could reach into
    the private folder.
    """
    text = check(name)
    kind = _kind(name)
    if kind == "abstract":
        return Address(text, "\0" + text[1:], "abstract")
    if kind == "path":
        return _path(text)
    return Address(text, _inside_private_folder(text), "name")


def _path(text: str) -> Address:
    # Absolute, so that a change of the working directory moves nothing.
    absolute = os.path.abspath(text)
    _check_length(absolute)
    return Address(text, absolute, "path")


def _check_length(absolute: str) -> None:
    """Refuse a path that no socket can have, wherever its folder is reached through."""
    size, leaf = len(os.fsencode(absolute)), len(os.fsencode(os.path.basename(absolute)))
    if size > ADDRESS_LIMIT and leaf > LEAF_LIMIT:
        raise ArgumentError(
            f"the path of an exporter has at most {ADDRESS_LIMIT} bytes, or a file name of at most "
            f"{LEAF_LIMIT}; got {size} bytes with a file name of {leaf}: {absolute!r}; choose a "
            f"shorter file name"
        )


def _inside_private_folder(name: str) -> str:
    """Return ``<name>.sock`` in it, or for a long name a hash that no bare name can look like.

    Only the name decides: both ends may see the folder under paths of different lengths.
    """
    leaf = f"{name}.sock"
    if len(leaf) > LEAF_LIMIT:
        leaf = f"~{hashlib.sha256(name.encode()).hexdigest()[:24]}.sock"
    return os.path.join(private_folder(), leaf)


def private_folder() -> str:
    """Return this user's own folder for sockets; make it if it is not there, then verify it.

    ``$XDG_RUNTIME_DIR/asyncvmm`` if that variable names a folder of ours, which it does not
    always do under sudo or in a container; else ``asyncvmm-<uid>`` in the temporary folder.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_folder_of(runtime, user):
        folder = os.path.join(runtime, "asyncvmm")
    else:
        folder = os.path.join(tempfile.gettempdir(), f"asyncvmm-{user}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    else:
        os.chmod(folder, 0o700)  # whatever the umask took away
    _verify_private(folder, user)
    return folder


def _is_folder_of(path: str, user: int) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user


def _verify_private(folder: str, user: int) -> None:
    # lstat, for a link could be turned elsewhere after this look.
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is a link or a file, not a folder"
    elif found.st_uid != user:
        wrong = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may enter"
    else:
        return
    raise AccessDeniedError(
        f"the private folder {folder!r} of user {user} {wrong}; it must be a folder of that user "
        f"with mode 0700: remove it or correct it, or point XDG_RUNTIME_DIR elsewhere",
        uid=found.st_uid,
        allowed=(user,),
    )
