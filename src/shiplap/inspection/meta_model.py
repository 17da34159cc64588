"""A model without memory, ranks or data: what can be known of it before anything starts."""

from typing import NoReturn

import torch

from shiplap.config import TransformerConfig
from shiplap.config.train import TrainConfig
from shiplap.dist.collectives import RankGroup
from shiplap.lora import Adapters, add_adapters
from shiplap.models.decoder import DecoderModel, build_model
from shiplap.parallel import apply_recompute


class _CountedRanks(RankGroup):
    """Ranks of which only the number is known. Whoever communicates with them is wrong."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    @property
    def process_group(self) -> NoReturn:
        """There is none."""
        raise AssertionError("a skeleton communicates nothing")


def skeleton(
    family: str, config: TrainConfig, *, model: TransformerConfig, adapters: Adapters | None, rank: int = 0
) -> DecoderModel:
    """A rank's shard of the model of a run, on the meta device.

    It is built by the code that builds the real one, with the run's own TP size and switches. What building asks of a
    process group is its size and this rank's place in it, so a group that has these and nothing else gives every layer
    the plan, the shapes and the frozen weights that it has in training, where they are alike on all ranks. Weights
    from a checkpoint change none of that.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run.
        model: sizes, from `shiplap.checkpoint.sizes`.
        adapters: what is trained instead of the model's own weights; None: those are.
        rank: among the TP ranks.

    Raises:
        UserError: the TP size does not divide heads, hidden or feed-forward size.
    """
    size = config.parallel.tensor_parallel_size
    group = _CountedRanks(size, rank) if size > 1 else None
    with torch.device("meta"):
        built = build_model(family, model, parallel=config.parallel, group=group, seed=None)
        apply_recompute(built, config.model.recompute)
        if adapters is not None:
            add_adapters(built, adapters, seed=None)
    return built
