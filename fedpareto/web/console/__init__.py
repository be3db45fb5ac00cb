"""The operators' console: pages of a federation for a browser on the operator's machine, read-only."""
