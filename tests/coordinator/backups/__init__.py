"""Tests of coordinator/backups."""
