"""The rules of a site's owner, and the site's answers to assignments and runs."""
