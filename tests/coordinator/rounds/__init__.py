"""Tests of coordinator/rounds."""
