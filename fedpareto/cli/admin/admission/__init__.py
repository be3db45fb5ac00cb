"""Admission of members, one or many at once: join strings, approval, and decisions of a second officer."""
