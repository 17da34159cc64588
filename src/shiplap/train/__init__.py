"""A training run: set-up, the loop, and what it shows and writes."""
