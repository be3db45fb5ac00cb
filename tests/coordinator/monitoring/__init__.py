"""Tests of coordinator/monitoring."""
