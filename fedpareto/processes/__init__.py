"""Processes that a command or a test starts: forks of a prepared server, and a federation that is made of them."""
