"""Tests of coordinator/alerts."""
