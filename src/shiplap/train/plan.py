"""The measured plan of a run, if it has one: the same on all ranks, measured now if it is to be."""

import dataclasses

from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.inspection.strict import check_strict
from shiplap.train.setup import Setup
from shiplap.tuning.progress import showing_progress
from shiplap.tuning.run import check_same_plan, found_or_measured


def with_plan(setup: Setup, env: GlobalEnv) -> Setup:
    """The run with the plan of `--tp-comm-plan`. All ranks call this together.

    Raises:
        AgreedError: on every rank, if ranks were given different plans, what is kept of earlier runs cannot be used, or
            the plan leaves a switch without effect that `--tp-comm-strict` wants to act.
    """
    config = setup.config
    if config.plan.tp_comm_plan is None:
        return setup
    if not config.plan.is_auto:
        check_same_plan(config, setup.plan)
        return setup
    bones = skeleton(setup.family, config, model=setup.model, adapters=setup.adapters, rank=env.coordinate("tp"))
    with showing_progress("measuring what overlaps best", is_shown=env.rank == 0) as progress:
        plan = found_or_measured(config, bones, env, progress)
    plan.apply(bones)
    with fail_together():
        check_strict(config.parallel, sites_of_run(bones, config))
    return dataclasses.replace(setup, plan=plan)
