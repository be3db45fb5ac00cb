"""The signed record of a run: bindings between messages, bundles, the tree of the audit log, definitions of metrics."""
