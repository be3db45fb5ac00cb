"""Comparisons with other implementations: `make test-peers`."""
