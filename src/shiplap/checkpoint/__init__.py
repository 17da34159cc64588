"""Models on disk: what others published, read and written in their own formats."""
