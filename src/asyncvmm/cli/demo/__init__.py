"""The demo: a vision transformer in one process, ranks of a language model in others.

Every file here is an ordinary user of the public face of the library.
"""
