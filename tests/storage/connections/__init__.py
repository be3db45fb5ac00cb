"""Tests of storage/connections."""
