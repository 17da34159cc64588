"""Where the methods of overlap come from: the switches alone, a measured plan, or measuring at the start."""

from dataclasses import dataclass

from shiplap.config.errors import UserError
from shiplap.config.option import check_at_least, option

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How what the switches let overlap is overlapped."""

    tp_comm_plan: str | None = option(
        None,
        "A measured plan, as `shiplap tune` writes it; or `auto`: measure before the first step, unless a plan for the "
        "same hardware, shapes and versions was kept. Default: the methods of the switches. Needs --tp-comm-overlap.",
    )
    tp_comm_plan_seconds: float | None = option(
        None,
        "At most so many seconds of measuring with `auto`; what is not clear by then does not overlap. Default: 60.",
    )

    def __post_init__(self) -> None:
        """Refuse times that are none, or for nothing."""
        check_at_least(self, 1, "tp_comm_plan_seconds")
        if self.tp_comm_plan_seconds is not None and not self.is_auto:
            raise UserError(
                f"--tp-comm-plan-seconds {self.tp_comm_plan_seconds:g} limits the measuring of --tp-comm-plan auto, "
                "which is not asked for. Add it, or drop the limit."
            )

    @property
    def is_auto(self) -> bool:
        """Whether to measure at the start."""
        return self.tp_comm_plan == AUTO

    @property
    def seconds(self) -> float:
        """The limit of `auto`."""
        return 60.0 if self.tp_comm_plan_seconds is None else self.tp_comm_plan_seconds
