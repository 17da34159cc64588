"""What communicates in a model, what overlaps, and why not where it does not."""
