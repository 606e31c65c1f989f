"""Memory: the pools and what happens in them.  No event loop, no socket, no tensor."""
