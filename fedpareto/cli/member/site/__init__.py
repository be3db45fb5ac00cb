"""`fedpareto worker ...` about the site itself: what it does now, what it was asked, has answered and has spent."""
