"""Tests of coordinator/audit."""
