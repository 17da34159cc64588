"""Token embedding with the vocabulary divided over the TP ranks (Shoeybi et al. 2019, section 3)."""

import torch.nn.functional as F
from torch import Tensor

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import AnyGroup, rank_in
from shiplap.dist.mappings import reduce_from_all, reduce_scatter_to_shard
from shiplap.tensor_parallel.linear import normal_init, resolve
from shiplap.tensor_parallel.parameters import ByName, Init, PlacedModule
from shiplap.tensor_parallel.placement import TP, Placement, Split

VOCABULARY = Split(multiple=64)
"""How a table of all tokens is divided. The output head multiplies by it, and bfloat16 tensor cores want sizes that are
multiples of 64 (cuBLAS's advice; with GPT-2's odd 50257 the products fall back to slow kernels)."""


class VocabParallelEmbedding(PlacedModule):
    """Each rank looks up the tokens of its part of the vocabulary; the sum over the ranks is every token's vector.

    Attributes:
        weight: `[Vp/R, H]`: Vp is the vocabulary V padded to a multiple of 64 R; the rows past V are zero.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: ModelParallelConfig | None = None,
        group: AnyGroup = None,
        init: Init | ByName = normal_init,
    ) -> None:
        """Make this rank's shard of the table `[V, H]`.

        Args:
            num_embeddings: V, the size of the vocabulary.
            embedding_dim: H.
            config: topology; by default that of `init_all_env`.
            group: the TP ranks; by default those of `init_all_env`.
            init: fills the full table `[V, H]` in place and returns it.
        """
        super().__init__()
        config, self.group = resolve(config, group)
        self.sequence_parallel = config.sequence_parallel
        placement = Placement(full_shape=(num_embeddings, embedding_dim), splits={TP: VOCABULARY})
        self.weight = self.new_parameter("weight", placement, self.group, init)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Token ids `[S, B]`, the same on all ranks, to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`)."""
        if self.group is None:
            return F.embedding(tokens_SB, self.weight)
        num_rows = self.weight.shape[0]
        local = tokens_SB - rank_in(self.group) * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        # Ids of other ranks look up row 0, and their result is cleared: row 0 gets no gradient from them.
        partial = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        scatter = reduce_scatter_to_shard if self.sequence_parallel else reduce_from_all
        return scatter(partial, self.group)
