"""The parts of a transformer block, under tensor and sequence parallelism. Plain keyword arguments, no run config."""
