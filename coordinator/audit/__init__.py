"""The audit log as the coordinator keeps it: chained, signed, shown to members, and verified."""
