"""Tests of federation/transport."""
