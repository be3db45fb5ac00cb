"""Tests of the ledgers of a worker."""
