"""The rules, and nothing else: no clock, socket, event loop, driver or tensor below here.

Inputs are method calls; outputs are lists that the caller drains after every input.
"""
