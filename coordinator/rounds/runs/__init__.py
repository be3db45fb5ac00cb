"""A run as a whole: its submission, members, consents and scores, and the noise that protects clients."""
