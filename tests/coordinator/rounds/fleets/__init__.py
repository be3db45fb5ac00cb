"""Tests of coordinator/rounds/fleets."""
