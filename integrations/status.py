"""The status line as an Accelerate tracker: what a script logs anyway is what the line shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from slideformer_backend.status import StatusLine

# Names under which scripts tell their trackers how many optimizer steps they will take.
_TOTALS = ("max_train_steps", "num_training_steps", "max_steps", "total_steps")


class StatusTracker(GeneralTracker):
    """Feeds a status line from `Accelerator.init_trackers`, `log` and `end_training`."""

    name = "slideformer_status"
    requires_logging_directory = False

    def __init__(self, line: StatusLine) -> None:
        super().__init__()
        self._line = line

    @property
    def tracker(self) -> StatusLine:
        return self._line

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        totals = [values[name] for name in _TOTALS if isinstance(values.get(name), int) and values[name] > 0]
        self._line.expect(totals[0] if totals else None)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:  # noqa: ANN401
        self._line.log(values)

    def finish(self) -> None:
        self._line.close()
