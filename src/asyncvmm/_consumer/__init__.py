"""The consumer's shell: it joins the core, memory, sockets and torch."""
