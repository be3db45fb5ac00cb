"""The code that all members share: identity, envelopes, vectors, run specifications, tasks."""
