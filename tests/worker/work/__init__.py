"""Tests of worker/work."""
