"""``asyncvmm doctor``: what this machine can do, what it costs, and what to do about the rest."""
