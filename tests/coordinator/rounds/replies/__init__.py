"""Tests of coordinator/rounds/replies."""
