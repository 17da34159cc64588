"""Tensor- and sequence-parallel training, with the communication hidden behind the matrix products."""
