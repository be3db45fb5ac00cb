"""The daemon: services for workers and operators, rounds, the audit log."""
