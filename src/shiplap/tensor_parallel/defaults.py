"""The one place where a layer that was given no config or group takes them from `GlobalEnv`."""

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import AnyGroup, Group, as_group, size_of
from shiplap.dist.environment import GlobalEnv


def resolve(config: ModelParallelConfig | None, given: AnyGroup) -> tuple[ModelParallelConfig, Group]:
    """The config and the TP group of a new layer.

    Raises:
        RuntimeError: something is missing and `init_all_env` was not called.
        ValueError: the group's size is not the config's TP size.
    """
    if config is None:
        config = GlobalEnv.instance().config
    group = as_group(given)
    if group is None and config.tensor_parallel_size > 1:
        group = GlobalEnv.instance().group("tp")
    if size_of(group) != config.tensor_parallel_size:
        raise ValueError(
            f"The tensor-parallel group has {size_of(group)} ranks, but tensor_parallel_size is "
            f"{config.tensor_parallel_size}. Give the layer the group of its config, or initialise with that config."
        )
    return config, group
