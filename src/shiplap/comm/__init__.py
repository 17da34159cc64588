"""Communication of the tensor-parallel layers: collectives, differentiable mappings, and overlap with products."""
