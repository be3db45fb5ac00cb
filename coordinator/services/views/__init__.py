"""Views for operators: rows of the record as the messages of the Admin service."""
