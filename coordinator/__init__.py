"""The daemon: services for workers and operators, the round engine, aggregation."""
