"""Sockets, names, peers and fences on an event loop.  No memory, no messages, no rules."""
