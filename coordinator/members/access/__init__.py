"""Access control on each call: the caller, the limits, and the refusals."""
