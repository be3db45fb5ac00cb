"""The daemon: services for workers and operators, rounds, aggregation."""
