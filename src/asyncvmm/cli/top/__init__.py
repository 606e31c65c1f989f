"""``asyncvmm top``: what running exporters do."""
