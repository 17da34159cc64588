"""The models by their family's name."""

from shiplap.config.model import TransformerConfig
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.models.build import Build
from shiplap.models.decoder import DecoderModel
from shiplap.models.gpt2 import GPT2
from shiplap.models.llama3 import Llama3
from shiplap.models.mixtral import Mixtral
from shiplap.models.qwen3 import Qwen3

FAMILIES: dict[str, type[DecoderModel]] = {"gpt2": GPT2, "llama3": Llama3, "qwen3": Qwen3, "mixtral": Mixtral}


def build_model(
    family: str,
    config: TransformerConfig,
    *,
    parallel: ModelParallelConfig,
    group: Group,
    recompute: str = "none",
    draw: bool = True,
) -> DecoderModel:
    """Build this rank's shard of a model, on the CPU in float32, drawn from the default generator.

    Args:
        family: a key of `FAMILIES`.
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        recompute: `none`, `selective` or `full`.
        draw: whether to draw initial weights; if not, all but norms' are left as memory happens to be, for a loader.

    Raises:
        UserError: the TP size does not divide heads, hidden or feed-forward size.
    """
    return FAMILIES[family](Build(config=config, parallel=parallel, group=group, recompute=recompute, draw=draw))
