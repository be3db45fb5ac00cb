"""Checks of the record whenever it is shown: envelopes, rows, the log and blobs."""
