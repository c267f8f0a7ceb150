"""Where chunks, manifests and the head live: one port, its adapters, and the contract they all pass."""
