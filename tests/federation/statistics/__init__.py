"""Tests of federation/statistics."""
