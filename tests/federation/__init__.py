"""Tests of federation."""
