"""Tests of coordinator/rounds/runs."""
