"""A run as a whole: its submission, members, consents, metrics and scores."""
