"""Several coordinators on one PostgreSQL: who they are, and which of them conducts which run."""
