"""Several coordinators on one PostgreSQL: what they tell each other."""
