"""Bytes between the coordinator and its members: TLS, channels, proxies, chunks, and checks on arrival."""
