"""Migrations: one for each set of tables that was released."""
