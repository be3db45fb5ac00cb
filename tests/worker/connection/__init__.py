"""Tests of worker/connection."""
