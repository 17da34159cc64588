"""`shiplap explain FAMILY`: what overlaps in training, and why not where it does not."""

from collections.abc import Sequence

from shiplap.commands.family import split_family
from shiplap.commands.options import parse_config
from shiplap.config.explain import ExplainConfig
from shiplap.inspection.strict import check_strict
from shiplap.tools.explain import as_json_lines, as_text, explain

_DESCRIPTION = (
    "Show, for each kind of layer, what it communicates, behind which product that hides, and why not where it does "
    "not. Takes the options of `shiplap train`, and starts nothing."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    split = split_family("explain", _DESCRIPTION, arguments)
    if split is None:
        return 0
    family, flags = split
    config = parse_config(ExplainConfig, flags, prog=f"shiplap explain {family}", description=_DESCRIPTION)
    sites = explain(family, config)
    print(as_json_lines(sites) if config.output.json else as_text(family, config, sites), flush=True)
    # Last, so that whoever is refused sees the table that says why.
    if not config.plan.is_auto:
        check_strict(config.parallel, sites)
    return 0
