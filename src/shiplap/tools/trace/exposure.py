"""Exposed communication: in which a rank could do nothing but wait, by layer and site, and by step.

Communication is *under way* from when a rank asks for it, on CUDA from when its kernel begins, until it is finished
there; others may be late, or it may wait for its turn, so this is not the time that its bytes take. It is *hidden*
while the rank does something else, and *exposed* while it waits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from shiplap.tools.trace.slices import RankTrace, Slice, union_ns
from shiplap.tools.trace.spans import MODEL, OUTSIDE, Lane

COMMUNICATION: tuple[Lane, ...] = ("AG", "RS", "other comm")
_SITES = ("forward", "recompute", "dgrad", "wgrad", "backward", "")


@dataclass(frozen=True, kw_only=True)
class StepExposure:
    """One step of one rank. The names are the keys of `exposed.jsonl`.

    Attributes:
        rank: counted from 0.
        step: counted from 1.
        train_loss: mean cross-entropy of the step, of all ranks; the bits that `shiplap train` would have.
        step_ms: by the host's clock.
        gemm_ms: with a product of a parallel layer.
        communication_ms: with communication under way.
        exposed_ms: of waiting for communication.
        exposed_percent: of `step_ms`.
    """

    rank: int
    step: int
    train_loss: float
    step_ms: float
    gemm_ms: float
    communication_ms: float
    exposed_ms: float
    exposed_percent: float


@dataclass(frozen=True, kw_only=True)
class SiteExposure:
    """One site of the layers of one kind, in one step of one rank. The names are the keys of `exposed.jsonl`.

    Attributes:
        rank: counted from 0.
        step: counted from 1.
        layer: module path with the block number folded; `model` for the loss, `step` for what comes after backward.
        num_layers: that it stands for.
        site: `forward`, `recompute`, `dgrad`, `wgrad`, or `backward` where it is none of these.
        method: the plan's; outside of the parallel layers the collective.
        num_communications: that were started.
        input_bytes: that this rank put into them.
        communication_ms: with one of them under way.
        exposed_ms: of waiting for them.
    """

    rank: int
    step: int
    layer: str
    num_layers: int
    site: str
    method: str
    num_communications: int
    input_bytes: int
    communication_ms: float
    exposed_ms: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A site in the mean over ranks and steps.

    Attributes:
        layer: see `SiteExposure`, as are the next three.
        num_layers: see above.
        site: see above.
        method: see above.
        communication_ms: in a step.
        exposed_ms: in a step.
    """

    layer: str
    num_layers: int
    site: str
    method: str
    communication_ms: float
    exposed_ms: float

    @property
    def hidden_percent(self) -> float:
        """How much of the time under way was used for something else."""
        return 100 * max(0.0, 1 - self.exposed_ms / self.communication_ms) if self.communication_ms else 0.0


def step_exposures(ranks: Sequence[RankTrace], losses: Mapping[int, float]) -> list[StepExposure]:
    """Of every rank and step.

    Args:
        ranks: what was recorded.
        losses: by step.
    """
    found = []
    for rank, trace in enumerate(ranks):
        for step, step_ms in trace.step_ms.items():
            own = [item for item in trace.slices if item.step == step]
            exposed_ms = _ms(own, "waiting")
            found.append(
                StepExposure(
                    rank=rank,
                    step=step,
                    train_loss=losses[step],
                    step_ms=step_ms,
                    gemm_ms=_ms(own, "GEMM"),
                    communication_ms=_ms(own, *COMMUNICATION),
                    exposed_ms=exposed_ms,
                    exposed_percent=100 * exposed_ms / step_ms,
                )
            )
    return found


def site_exposures(ranks: Sequence[RankTrace]) -> list[SiteExposure]:
    """Of every rank, step and site that communicates, in the order of the model."""
    found = []
    for rank, trace in enumerate(ranks):
        for step in trace.step_ms:
            own = [item for item in trace.slices if item.step == step]
            sites: dict[tuple[str, str, str], list[Slice]] = defaultdict(list)
            for item in own:
                if item.lane == "waiting" or item.lane in COMMUNICATION:
                    sites[folded(item.layer), item.site, item.method].append(item)
            # Modules come in the order in which their forward began, and what belongs to none of them after that.
            order = list(dict.fromkeys(folded(item.layer) for item in own))
            found += [
                _site(rank, step, key, sites[key])
                for key in sorted(
                    sites,
                    key=lambda key: (key[0] == OUTSIDE, key[0] == MODEL, order.index(key[0]), _SITES.index(key[1])),
                )
            ]
    return found


def _site(rank: int, step: int, key: tuple[str, str, str], slices: Sequence[Slice]) -> SiteExposure:
    communications = [item for item in slices if item.lane in COMMUNICATION]
    layer, site, method = key
    return SiteExposure(
        rank=rank,
        step=step,
        layer=layer,
        num_layers=len({item.layer for item in slices}),
        site=site,
        method=method,
        num_communications=len(communications),
        input_bytes=sum(item.num_bytes for item in communications),
        communication_ms=_ms(slices, *COMMUNICATION),
        exposed_ms=_ms(slices, "waiting"),
    )


def mean_rows(exposures: Sequence[SiteExposure], *, num_ranks: int, num_steps: int) -> list[Row]:
    """Each site once, in the mean over so many ranks and steps."""
    sites: dict[tuple[str, str, str], list[SiteExposure]] = defaultdict(list)
    for exposure in exposures:
        sites[exposure.layer, exposure.site, exposure.method].append(exposure)
    return [
        Row(
            layer=layer,
            num_layers=max(item.num_layers for item in found),
            site=site,
            method=method,
            communication_ms=sum(item.communication_ms for item in found) / (num_ranks * num_steps),
            exposed_ms=sum(item.exposed_ms for item in found) / (num_ranks * num_steps),
        )
        for (layer, site, method), found in sites.items()
    ]


def mean_step(exposures: Sequence[StepExposure]) -> StepExposure:
    """The mean over ranks and steps, as rank and step -1."""
    values = [asdict(item) for item in exposures]
    means: dict[str, Any] = {name: fmean(value[name] for value in values) for name in values[0]}
    return StepExposure(**means | {"rank": -1, "step": -1})


def folded(layer: str) -> str:
    """`blocks.*.mlp.fc1` for `blocks.0.mlp.fc1`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", layer, count=1)


def _ms(slices: Iterable[Slice], *lanes: Lane) -> float:
    return union_ns(item for item in slices if item.lane in lanes) / 1e6
