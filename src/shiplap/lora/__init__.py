"""Low-rank adapters (Hu et al. 2021)."""
