"""Stubs generated from proto/federation/v1 (`make proto`)."""
