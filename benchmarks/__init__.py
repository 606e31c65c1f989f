"""Compare ways to hand tensors from one process to others: ``python -m benchmarks --help``.

A *transport* is one way to do it, a *workload* what it is asked to do, a *lane* one transport on
one event loop, in processes of its own.  All lanes of a workload take turns, round by round.
"""
