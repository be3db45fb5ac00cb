"""The way of a reply into the record: checks, bounds, uploads, and what was signed."""
