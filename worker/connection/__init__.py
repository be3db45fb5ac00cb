"""The connection of a worker to its coordinator: joining, certificates, attendance, and signed times."""
