"""The optimizer: AdamW, its learning-rate schedule, and gradient clipping over tensor-parallel ranks."""

from shiplap.optim.clipping import clip_gradients, gradient_norm
from shiplap.optim.optimizer import build_adamw, learning_rate_at, set_learning_rate

__all__ = ["build_adamw", "clip_gradients", "gradient_norm", "learning_rate_at", "set_learning_rate"]
