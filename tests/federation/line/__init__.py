"""Tests of federation/line."""
