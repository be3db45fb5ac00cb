"""The rules of a site's owner (policy, consents, roster, privacy), and the site's answers to assignments and runs."""
