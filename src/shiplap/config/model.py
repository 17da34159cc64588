"""The shape of a transformer."""

from dataclasses import dataclass

from shiplap.config.option import UserError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How LLaMA 3.1 stretches rotary positions beyond the length that it was first trained on.

    Attributes:
        factor: low frequencies are divided by this.
        low_freq_factor: wavelengths above `original_max_sequence_length` / this are stretched whole.
        high_freq_factor: wavelengths below `original_max_sequence_length` / this are left alone.
        original_max_sequence_length: in tokens.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_sequence_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """One model's sizes. The sizes are the full model's, never a rank's.

    Attributes:
        vocab_size: number of tokens; the model pads it inside.
        hidden_size: H, the width of the residual stream.
        num_layers: number of decoder blocks.
        num_attention_heads: query heads.
        ffn_hidden_size: F, the width of the feed-forward layer.
        max_sequence_length: longest sequence, in tokens.
        num_key_value_heads: heads of keys and values, each shared by equally many query heads; None: as many as
            query heads.
        head_dim: size of a head; None: H divided evenly among the query heads.
        dropout: probability, used after the embedding, on attention weights and on both residual branches.
        norm_epsilon: added to the variance, or to the mean square, in norms.
        initializer_range: standard deviation of the initial weights.
        rope_theta: base of the rotary frequencies; models with learned positions do not read it.
        rope_scaling: how rotary positions are stretched; None: not at all.
        tie_embeddings: the output head multiplies by the embedding table.
        num_experts: feed-forward layers of each block, of which a token takes some; 0: the one of a dense model.
        num_experts_per_token: how many a token takes.
        router_aux_loss_coefficient: weight of the load-balancing loss beside the cross-entropy.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_sequence_length: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dropout: float = 0.0
    norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    num_experts: int = 0
    num_experts_per_token: int = 2
    router_aux_loss_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that make no transformer."""
        for flag, size in (
            ("--vocab-size", self.vocab_size),
            ("--hidden-size", self.hidden_size),
            ("--num-layers", self.num_layers),
            ("--num-attention-heads", self.num_attention_heads),
            ("--num-key-value-heads", self.key_value_heads),
            ("--ffn-hidden-size", self.ffn_hidden_size),
            ("--max-sequence-length", self.max_sequence_length),
        ):
            if size < 1:
                raise UserError(f"{flag} must be at least 1, got {size}.")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}."
            )
        if self.num_attention_heads % self.key_value_heads:
            raise UserError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by --num-key-value-heads "
                f"{self.key_value_heads}: each must serve equally many query heads."
            )
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise UserError(
                f"A token cannot take {self.num_experts_per_token} of {self.num_experts} experts (--num-experts)."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"--dropout must be in [0, 1), got {self.dropout}.")

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    def check_divisible_by(self, tensor_parallel_size: int) -> None:
        """Refuse a TP size that cannot split this model evenly, naming both numbers.

        Key-value heads need not be divisible: ranks share those that they need.

        Raises:
            UserError: query heads, hidden or feed-forward size is not a multiple of `tensor_parallel_size`; or a
                rank's share of an expert cannot be multiplied in groups.
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
        share = self.ffn_hidden_size // tensor_parallel_size
        if self.num_experts and (share % 8 or self.hidden_size % 8):
            raise UserError(
                f"Experts need sizes that are multiples of 8, for their grouped products; --ffn-hidden-size "
                f"{self.ffn_hidden_size} / --tensor-parallel {tensor_parallel_size} is {share}, and --hidden-size "
                f"{self.hidden_size}."
            )
