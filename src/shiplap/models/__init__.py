"""The models: how blocks are wired."""
