"""What several sides share: identity, envelopes, vectors, run specifications, tasks, and aggregation."""
