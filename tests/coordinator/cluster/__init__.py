"""Tests of coordinator/cluster."""
