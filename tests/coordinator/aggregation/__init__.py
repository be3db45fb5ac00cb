"""Tests of coordinator/aggregation."""
