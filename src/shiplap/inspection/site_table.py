"""Sites of communication as plain text."""

import textwrap
from collections.abc import Sequence

from shiplap.inspection.sites import Site

_HEADER = ("layer", "site", "communicates", "method", "bytes/rank", "hidden behind, or why not")


def site_table(sites: Sequence[Site], *, width: int | None = None) -> str:
    """An aligned table, a line for each site.

    Args:
        sites: what to show.
        width: in columns; what is longer goes on in the next line. None: lines as long as they are.
    """
    rows = [_HEADER]
    for number, site in enumerate(sites):
        is_first = number == 0 or sites[number - 1].layer != site.layer
        rows.append(
            (_layer(site) if is_first else "", site.site, site.communicates, _method(site), _size(site), _overlap(site))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    start = sum(widths) + 2 * len(widths)
    lines = []
    for *cells, last in rows:
        padded = [
            cell.rjust(size) if title == "bytes/rank" else cell.ljust(size)
            for cell, size, title in zip(cells, widths, _HEADER, strict=False)
        ]
        # However narrow, some words must stand in a line.
        room = len(last) if width is None else max(width - start, 20)
        first, *others = textwrap.wrap(last, room, break_on_hyphens=False, break_long_words=False)
        lines.append("  ".join((*padded, first)))
        lines += [" " * start + other for other in others]
    return "\n".join(lines)


def _layer(site: Site) -> str:
    return site.layer if site.num_layers == 1 else f"{site.layer} × {site.num_layers}"


def _method(site: Site) -> str:
    return "-" if site.messages_per_micro_batch == 0 else site.method


def _size(site: Site) -> str:
    if site.messages_per_micro_batch == 0:
        return "-"
    size = in_bytes(site.message_bytes_per_rank)
    return size if site.messages_per_micro_batch == 1 else f"{site.messages_per_micro_batch} × {size}"


def _overlap(site: Site) -> str:
    if site.hidden_behind is None:
        return site.why_not
    why = ", measured" if site.is_measured else ", plan replaced" if site.is_plan_replaced else ""
    return f"the {site.hidden_behind} product{why}"


def in_bytes(count: int) -> str:
    """A number of bytes for the eye, such as `1.5 MiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # What rounds to 1024.0 is written in the larger unit.
        if size < 1023.95:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
