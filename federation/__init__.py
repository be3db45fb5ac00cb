"""What several sides share: identity, envelopes, vectors, run specifications, tasks, and the mathematics of aggregation."""
