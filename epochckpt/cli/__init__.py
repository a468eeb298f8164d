"""The command `epochckpt`: `epochckpt --help`, docs/inspect.md."""
