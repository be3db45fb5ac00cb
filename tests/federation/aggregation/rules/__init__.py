"""Tests of federation/aggregation/rules."""
