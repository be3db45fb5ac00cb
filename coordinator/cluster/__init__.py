"""Several coordinators on one PostgreSQL: who they are, which conducts which run, and what they tell each other."""
