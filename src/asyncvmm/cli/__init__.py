"""The ``asyncvmm`` command.

Importing it imports neither typer nor torch, and ``asyncvmm --help`` imports no torch.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the ``asyncvmm`` script."""
    from asyncvmm.cli.app import app
    from asyncvmm.cli.ends import told_of_a_full_disk

    with told_of_a_full_disk():
        app()
