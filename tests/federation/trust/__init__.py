"""Tests of federation/trust."""
