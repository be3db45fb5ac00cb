"""The worker: session with the coordinator, local training, spool. It dials out and accepts no connection."""
