"""``python -m asyncvmm.cli`` is the ``asyncvmm`` script, for trees that are not installed."""

from __future__ import annotations

from asyncvmm.cli import main

if __name__ == "__main__":
    main()
