"""Where this rank sits, and the process groups that follow from it."""

from shiplap.dist.environment import GlobalEnv, destroy_all_env, init_all_env
from shiplap.dist.axes import RankLayout, layout_for

__all__ = ["GlobalEnv", "RankLayout", "destroy_all_env", "init_all_env", "layout_for"]
