"""Adapters to other systems; each module needs the package of the system it adapts to."""
