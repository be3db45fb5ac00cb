"""Tests of federation/secure."""
