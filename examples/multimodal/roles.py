"""The processes of this example; importing this imports none of what they need."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from typing import Any

ROLES = ("encoder", "rank", "whole")


def play(role: str, arguments: tuple[Any, ...]) -> None:
    """Be one of the processes: run the function that has the name of its module."""
    module = importlib.import_module(f"examples.multimodal.{role}")
    function: Callable[..., Coroutine[Any, Any, None]] = getattr(module, role)
    asyncio.run(function(*arguments))
