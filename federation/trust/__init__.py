"""Keys, certificates and signed envelopes, and the files that hold them."""
