"""The shape of a transformer."""

from dataclasses import dataclass

from shiplap.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """One model's sizes. The sizes are the full model's, never a rank's.

    Attributes:
        vocab_size: number of tokens; the model pads it inside to a multiple of TP.
        hidden_size: H, the width of the residual stream.
        num_layers: number of decoder blocks.
        num_attention_heads: query heads; H is divided evenly among them.
        ffn_hidden_size: F, the width of the feed-forward layer.
        max_sequence_length: longest sequence, in tokens, that the position embedding covers.
        dropout: probability, used after the embedding, on attention weights and on both residual branches.
        layer_norm_epsilon: added to the variance in layer norm.
        initializer_range: standard deviation of the initial weights.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_sequence_length: int
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Refuse sizes that make no transformer."""
        for flag, size in (
            ("--vocab-size", self.vocab_size),
            ("--hidden-size", self.hidden_size),
            ("--num-layers", self.num_layers),
            ("--num-attention-heads", self.num_attention_heads),
            ("--ffn-hidden-size", self.ffn_hidden_size),
            ("--max-sequence-length", self.max_sequence_length),
        ):
            if size < 1:
                raise UserError(f"{flag} must be at least 1, got {size}.")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"--dropout must be in [0, 1), got {self.dropout}.")

    def check_divisible_by(self, tensor_parallel_size: int) -> None:
        """Refuse a TP size that cannot split this model evenly, naming both numbers.

        Raises:
            UserError: heads, hidden or feed-forward size is not a multiple of `tensor_parallel_size`.
        """
        for flag, size in (
            ("--hidden-size", self.hidden_size),
            ("--num-attention-heads", self.num_attention_heads),
            ("--ffn-hidden-size", self.ffn_hidden_size),
        ):
            if size % tensor_parallel_size:
                raise UserError(
                    f"{flag} {size} is not divisible by --tensor-parallel {tensor_parallel_size}: "
                    "each rank must hold the same share."
                )
