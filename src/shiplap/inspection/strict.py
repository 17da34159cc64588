"""`--tp-comm-strict`: a switch that is on and acts nowhere is an error.

A switch is *asked for* if it is on, by a flag or by default. Without `--tp-comm-overlap` nothing overlaps, and the
switches that are on by default ask for nothing; those that are off by default are still asked for where they are on.

| asked for | acts if at one site at least |
|---|---|
| `bulk_wgrad`, `bulk_dgrad`, `overlap_ag`, `overlap_rs`, `…_rs_dgrad` | it makes a message overlap with a product |
| `keep_gathered` | it saves a gather |
| `overlap_disable_qkv`, `overlap_disable_fc1` | it keeps off a pipeline that would be there without it |

What another switch takes the place of, as its help says, is not missed: `bulk_dgrad` where `overlap_rs_dgrad` acts,
`bulk_wgrad` where `keep_gathered` does. A replaced plan is nobody's switch: what overlaps by it alone makes none act.
The master switch asks for nothing beyond the others.
"""

from collections.abc import Sequence

from shiplap.config import ModelParallelConfig, UserError
from shiplap.inspection.sites import COLUMN_PIPELINES, DISABLE_OPTIONS, PLACES, Reason, Site, flag

_ON_BY_DEFAULT = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad")


def check_strict(parallel: ModelParallelConfig, sites: Sequence[Site]) -> None:
    """Refuse switches that are asked for and do not act, if the configuration is strict.

    Args:
        parallel: the switches.
        sites: of the model, from `communication_sites`.

    Raises:
        UserError: lists the switches, each with the sites where it could act and why it does not.
    """
    if not parallel.tp_comm_strict:
        return
    idle = not_acting(parallel, sites)
    if not idle:
        return
    lines = ["--tp-comm-strict: what is on must act somewhere, but"]
    for name, places in idle.items():
        lines.append(f"  {name} acts nowhere:")
        lines += [f"    {place}" for place in places]
    off = " ".join(f"--no-{name.removeprefix('--')}" for name in idle)
    lines.append(f"Turn off what cannot act ({off}), make it act, or drop --tp-comm-strict.")
    raise UserError("\n".join(lines))


def not_acting(parallel: ModelParallelConfig, sites: Sequence[Site]) -> dict[str, list[str]]:
    """The switches that are asked for and do not act, by flag; for each the sites where it could, with the reason."""
    acting = {site.switch for site in sites}
    is_kept = parallel.tp_comm_keep_gathered and any(site.reason is Reason.KEPT_GATHERED for site in sites)
    acting |= {flag("tp_comm_keep_gathered")} if is_kept else set()
    if flag("tp_comm_overlap_rs_dgrad") in acting:
        acting.add(flag("tp_comm_bulk_dgrad"))
    if is_kept:
        acting.add(flag("tp_comm_bulk_wgrad"))
    idle = {}
    asked = [*(_ON_BY_DEFAULT if parallel.tp_comm_overlap else ()), "tp_comm_overlap_rs_dgrad", "tp_comm_keep_gathered"]
    for field in asked:
        if getattr(parallel, field) and flag(field) not in acting:
            idle[flag(field)] = [
                f"{site.layer} {site.site}: {_why(field, site)}" for site in sites if _is_for(field, site)
            ]
    for field in DISABLE_OPTIONS.values():
        whys = {
            f"{site.layer} {site.site}": _why_not_kept_off(parallel, site) for site in sites if _denies(field, site)
        }
        if getattr(parallel, field) and all(whys.values()):
            idle[flag(field)] = [f"{place}: no pipeline to keep off, {why}" for place, why in whys.items()]
    return idle


def _denies(option: str, site: Site) -> bool:
    """Whether the option denies the site a pipeline, be it there or not."""
    return site.disabled_by == flag(option) and any(_is_for(field, site) for field in COLUMN_PIPELINES)


def _why_not_kept_off(parallel: ModelParallelConfig, site: Site) -> str:
    """Why there would be no pipeline at the site even if nothing denied it; empty if there would be one."""
    if not parallel.tp_comm_overlap:
        return f"{flag('tp_comm_overlap')} is off"
    [pipeline] = [field for field in COLUMN_PIPELINES if _is_for(field, site)]
    if not getattr(parallel, pipeline):
        return f"{flag(pipeline)} is off"
    return site.why_not if site.messages_per_micro_batch == 0 else ""


def _is_for(field: str, site: Site) -> bool:
    """Whether the switch could act at the site."""
    if field == "tp_comm_keep_gathered":
        return (site.kind, site.site) == ("column", "wgrad")
    return any(place.site == site.site and field in place.switches for place in PLACES[site.kind])


def _why(field: str, site: Site) -> str:
    """Why the switch does not act at the site."""
    if site.why_not:
        return site.why_not
    if site.disabled_by and field in COLUMN_PIPELINES:
        return f"{site.disabled_by} is on"
    return f"{site.switch} acts instead" if site.switch else f"plan replaced by {site.method}"
