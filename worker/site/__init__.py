"""The rules of a site's owner, and what the site answers to assignments and runs that they do not allow."""
