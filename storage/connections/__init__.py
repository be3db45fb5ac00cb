"""Connections to the database, and the SQL statements that they share."""
