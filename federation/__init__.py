"""What every member shares: identity, envelopes, vectors, run specifications, tasks."""
