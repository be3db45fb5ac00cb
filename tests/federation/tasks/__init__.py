"""Tests of federation/tasks."""
