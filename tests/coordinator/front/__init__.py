"""Tests of coordinator/front."""
