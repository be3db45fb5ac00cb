"""Who is a member: joining, being approved and revoked, and what each caller may do."""
