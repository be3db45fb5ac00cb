"""Tests of federation/training."""
