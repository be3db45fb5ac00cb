"""Tests of coordinator/aggregation/rules."""
