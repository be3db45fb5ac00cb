"""Tests of federation/work."""
