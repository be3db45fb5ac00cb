"""Tests of fedpareto."""
