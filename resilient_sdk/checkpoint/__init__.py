"""A rank's state on its way to memory and to the store, and back. See FORMAT.md. Never imports torch."""
