"""The signed record of a run: the bindings between messages, bundles, and the tree of the audit log."""
