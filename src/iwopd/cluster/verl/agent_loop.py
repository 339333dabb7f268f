"""Horizons on verl: an agent loop that ends each answer at the limit of its row.

The file of prompts has a row for every prompt of every step, so the limit of a step stands in its rows (`extra_info.limit`).
Problems of an evaluation have none (0): their answers are written to the end.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class LimitedAgentLoop(SingleTurnAgentLoop):  # type: ignore[misc]  # verl has no types
    """verl's own for single turns, with fewer tokens."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        limit = int(row["extra_info"]["limit"])
        return await super().run({**sampling_params, "max_tokens": limit} if limit else sampling_params, **row)
