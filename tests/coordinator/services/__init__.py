"""Tests of coordinator/services."""
