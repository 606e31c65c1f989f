"""The public names are exactly those of ``__all__``, and every one explains itself."""

from __future__ import annotations

import inspect
from importlib import resources
from types import ModuleType

import asyncvmm

PUBLIC_MODULES = {"blocking", "cli", "integrations", "testing", "tickets"}
"""Modules a user imports by name; they have public names of their own."""


def test_nothing_public_outside_all() -> None:
    """Kills the planted bug of a helper that leaks into the package's namespace."""
    seen = {
        name
        for name, value in vars(asyncvmm).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and name in PUBLIC_MODULES)
    }
    public = {name for name in asyncvmm.__all__ if not name.startswith("__")}
    assert seen <= public, f"public but not in __all__: {sorted(seen - public)}"


def test_all_is_sorted_complete_and_without_doubles() -> None:
    """Kills the planted bug of a name in ``__all__`` that cannot be imported."""
    assert len(set(asyncvmm.__all__)) == len(asyncvmm.__all__)
    assert [name for name in asyncvmm.__all__ if not hasattr(asyncvmm, name)] == []


def test_every_public_name_has_a_docstring() -> None:
    """Kills the planted bug of a public method added without a word about it."""
    silent = []
    for name in asyncvmm.__all__:
        value = getattr(asyncvmm, name)
        if not callable(value):
            continue
        if not (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__):
            silent.append(name)
        if inspect.isclass(value) and value.__module__.startswith("asyncvmm"):
            silent += [
                f"{name}.{attribute}"
                for attribute, member in vars(value).items()
                if not attribute.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property))
                and not inspect.getdoc(member)
            ]
    assert silent == []


def test_package_is_typed() -> None:
    """Kills the planted bug of a wheel without its py.typed marker."""
    assert resources.files(asyncvmm).joinpath("py.typed").is_file()
