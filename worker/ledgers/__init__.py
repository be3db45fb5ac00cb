"""What a site has done and spent: one SQLite file a ledger, under one rule, kept for as long as the home is."""
