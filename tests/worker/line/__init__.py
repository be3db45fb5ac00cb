"""Tests of worker/line."""
