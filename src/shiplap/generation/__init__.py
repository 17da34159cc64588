"""Writing text, token by token."""

from shiplap.generation.decode import generate

__all__ = ["generate"]
