"""The way of a reply into the record: checks, bounds, uploads, signed columns and evidence."""
