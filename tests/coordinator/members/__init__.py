"""Tests of coordinator/members."""
