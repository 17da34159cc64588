"""Writing text, token by token."""
