"""Tests of worker/site."""
