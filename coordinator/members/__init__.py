"""Membership: enrollment, approval, revocation, and access control on each call."""
