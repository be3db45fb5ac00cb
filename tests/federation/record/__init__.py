"""Tests of federation/record."""
