"""The models by their family's name."""

from shiplap.config.model import TransformerConfig
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.models.build import Build, Stage
from shiplap.models.decoder import DecoderModel
from shiplap.models.gpt2 import GPT2
from shiplap.models.llama3 import Llama3
from shiplap.models.mixtral import Mixtral
from shiplap.models.qwen3 import Qwen3
from shiplap.tensor_parallel.parameters import draw_by_name

FAMILIES: dict[str, type[DecoderModel]] = {"gpt2": GPT2, "llama3": Llama3, "qwen3": Qwen3, "mixtral": Mixtral}


def build_model(
    family: str,
    config: TransformerConfig,
    *,
    parallel: ModelParallelConfig,
    group: Group,
    seed: int | None,
    stage: Stage | None = None,
) -> DecoderModel:
    """Build this rank's part of a model, on the CPU in float32.

    Args:
        family: a key of `FAMILIES`.
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        seed: of the initial weights; None leaves all but norms and biases as memory happens to be, for a loader.
        stage: the part to build; None: the whole model.

    Raises:
        UserError: the TP size does not divide heads, hidden or feed-forward size.
    """
    model = FAMILIES[family](Build(config=config, parallel=parallel, group=group, stage=stage))
    if seed is not None:
        draw_by_name(model, seed=seed, group=group)
    return model
