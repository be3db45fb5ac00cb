"""Keys, their rotations, certificates, identities and signed envelopes, and the directories that hold them."""
