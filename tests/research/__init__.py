"""Tests of what is in no wheel: leakage and the search for attacks on private sums."""
