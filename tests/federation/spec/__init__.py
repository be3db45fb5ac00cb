"""Tests of federation/spec."""
