"""What the ranks found out about a group of cases: each about its own part, then all of them together."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, size_of
from shiplap.tools.verify.cases import Case, CaseGroup
from shiplap.tools.verify.chain import solve_chain
from shiplap.tools.verify.layer import solve_layer
from shiplap.tools.verify.solution import Solution, Tensors

Baselines = dict[Case, Tensors]


@dataclass(kw_only=True)
class Finding:
    """One rank's part of a group of cases.

    Attributes:
        error: largest relative error against float64.
        off_sequential: by tensor, the largest relative difference from the same case without overlap; 0 is the same
            to the bit. None: there is nothing to compare with.
        off_repeat: likewise, from the same case once more.
        digests: of each case, by tensor, of what all TP ranks must have alike.
        failures: what is wrong, as text, case and tensor named.
    """

    error: float = 0.0
    off_sequential: dict[str, float] | None = None
    off_repeat: dict[str, float] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """To be sent to the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Finding":
        """As another rank sent it."""
        return cls(**json.loads(text))


def find_out(cases: CaseGroup, group: Group, baselines: Baselines) -> Finding:
    """Solve every case twice on this rank, and compare.

    Args:
        cases: what to solve.
        group: the TP ranks, all of which call this.
        baselines: results without overlap of all cases so far; those of these cases are added.

    Raises:
        Exception: whatever a case raises, with the case's name. The other ranks may be waiting for this one then, so
            nothing but ending the job helps.
    """
    finding = Finding()
    if any(case != case.sequential for case in cases.cases):
        finding.off_sequential = {}
    solve = solve_chain if cases.cases[0].subject == "chain" else solve_layer
    for case in cases.cases:
        try:
            solution, again = solve(case, group), solve(case, group)
        except Exception as error:
            error.add_note(f"shiplap verify: this was {cases.name}, {cases.dtype}: {case}")
            raise
        _compare_with_reference(finding, case, solution, cases.tolerance(size_of(group)))
        if case == case.sequential:
            baselines[case] = solution.got
        elif finding.off_sequential is not None:
            _add_differences(finding.off_sequential, solution.got, baselines[case.sequential])
        _add_differences(finding.off_repeat, again.got, solution.got)
        finding.digests.append(
            {name: _digest(solution.got[name]) for name in solution.replicated & solution.got.keys()}
        )
    return finding


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm; infinite if there is no such number."""
    reference = reference.double().cpu()
    error = float((result.double().cpu() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else math.inf


def _compare_with_reference(finding: Finding, case: Case, solution: Solution, tolerance: float) -> None:
    problems = [*solution.mistakes]
    for name, expected in solution.expected.items():
        result = solution.got.get(name)
        if result is None:
            problems.append(f"{name} is missing")
        elif result.shape != expected.shape:
            problems.append(f"{name} is {[*result.shape]}, not {[*expected.shape]}")
        else:
            error = relative_error(result, expected)
            finding.error = max(finding.error, error)
            if error > tolerance:
                problems.append(f"{name} is off by {error:.1e}, more than {tolerance:.1e}")
    finding.failures += [f"{problem} ({case})" for problem in problems]


def _add_differences(largest: dict[str, float], results: Tensors, others: Tensors) -> None:
    for name in results.keys() & others.keys():
        result, other = results[name], others[name]
        # The smallest number there is, where the bits differ and the norm doesn't show it.
        off = 0.0 if torch.equal(result, other) else max(_difference(result, other), 5e-324)
        largest[name] = max(largest.get(name, 0.0), off)


def _difference(result: Tensor, other: Tensor) -> float:
    return relative_error(result, other) if result.shape == other.shape else math.inf


def _digest(x: Tensor) -> str:
    return hashlib.sha256(bytes(x.cpu().flatten().view(torch.uint8).tolist())).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Row:
    """All ranks' findings about a group of cases: one row of the table. The attributes are those of `Finding`."""

    name: str
    dtype: str
    num_cases: int
    error: float
    tolerance: float
    off_sequential: Mapping[str, float] | None
    off_repeat: Mapping[str, float]
    failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether every case is right on every rank. That all bits are the same is not asked for."""
        return not self.failures


def agree(cases: CaseGroup, findings: Sequence[Finding], num_tp_ranks: int) -> Row:
    """What all ranks say together; they are in rank order, so that TP groups are neighbours."""
    failures = [f"rank {rank}: {failure}" for rank, finding in enumerate(findings) for failure in finding.failures]
    for rank, finding in enumerate(findings):
        first = rank - rank % num_tp_ranks
        for case, own, other in zip(cases.cases, finding.digests, findings[first].digests, strict=True):
            failures += [
                f"rank {rank}: {name} is not to the bit what rank {first} has, as it must be ({case})"
                for name, digest in own.items()
                if digest != other.get(name, digest)
            ]
    compared = [finding.off_sequential for finding in findings if finding.off_sequential is not None]
    return Row(
        name=cases.name,
        dtype=cases.dtype,
        num_cases=len(cases.cases),
        error=max(finding.error for finding in findings),
        tolerance=cases.tolerance(num_tp_ranks),
        off_sequential=_largest(compared) if compared else None,
        off_repeat=_largest([finding.off_repeat for finding in findings]),
        failures=failures,
    )


def _largest(differences: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for by_name in differences for name in by_name})
    return {name: max(by_name.get(name, 0.0) for by_name in differences) for name in names}
