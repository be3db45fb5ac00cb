"""Bytes between coordinators and members: TLS, channels, choice of a coordinator, proxies, chunks, arrival checks."""
