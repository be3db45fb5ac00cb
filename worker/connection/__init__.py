"""The connection of a worker to its coordinator: joining, certificates, attendance, signed times, the witness."""
