"""Admission of members, one or many at once: join strings, approval, and consents of a second officer."""
