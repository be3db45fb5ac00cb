"""Tests of federation/aggregation."""
