"""The papers' experiments: definitions, published numbers, runs, tables and figures."""
