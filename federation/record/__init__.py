"""The signed record of a run: which messages belong together, bundles, and the tree of the audit log."""
