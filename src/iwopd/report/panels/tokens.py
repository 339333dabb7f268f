"""The token view: single answers, every token with its numbers. Drawn in the browser, one rollout at a time."""

from __future__ import annotations

from iwopd.report.charts import Panel
from iwopd.report.gathering import ReportData
from iwopd.report.token_columns import DRIFT, STEPS, Packed, TokenTable, pack_rollout
from iwopd.runs.reading import Run
from iwopd.tiny import EXPLANATION
from iwopd.tiny.task import right_solution

EXAMPLE = "7+4*3-9"
"""Small, and with a product whose last digit is not its value."""


def build(data: ReportData) -> Panel | None:
    if not data.runs:
        return None
    table = TokenTable()
    packed = {run.name: _pack(run, table, data) for run in data.runs}
    kept = _within_limit(packed, data)
    if not any(kept.values()):
        data.notes.add("token view", "no run kept a rollout that can be read")
        return None
    runs = []
    for run in data.runs:
        group = next(group for group in data.groups if run in group.runs)
        rollouts = [one.as_json() for one in kept[run.name]]
        if rollouts:
            runs.append({"name": run.name, "label": group.label, "style": group.style, "rollouts": rollouts})
    return Panel(
        "tokens",
        "Token by token",
        "Single answers of the student, as it wrote them in the evaluations. Choose one and see where it drifts from its "
        "teacher, and which weights the run's own method gives.",
        template="tokens.html.j2",
        context={"drift": DRIFT, "worlds": _worlds(data), "example": EXAMPLE, "solution": right_solution(EXAMPLE)},
        data={"runs": runs, "table": table.blob(), "steps": STEPS, "drift": DRIFT},
    )


def _worlds(data: ReportData) -> str:
    """What the answers of embedded worlds are about; empty where there are none."""
    return EXPLANATION if any(run.setting("models.world", str) for run in data.runs) else ""


def _pack(run: Run, table: TokenTable, data: ReportData) -> list[Packed]:
    packed = [pack_rollout(record, table) for record in run.log("rollouts.jsonl")]
    rollouts = [one for one in packed if one is not None]
    if bad := len(packed) - len(rollouts):
        data.notes.add(run.name, f"rollouts.jsonl: {bad} rollouts have no readable tokens and are left out")
    names = {"gap": "gap", "weight": "weights", "kl": "KL", "teacher": "teacher log-probs", "student": "student log-probs"}
    if lacking := [words for column, words in names.items() if any(column not in one.columns for one in rollouts)]:
        data.notes.add(run.name, f"rollouts.jsonl: some rollouts have no {', '.join(lacking)} for their tokens")
    return rollouts


def _within_limit(packed: dict[str, list[Packed]], data: ReportData) -> dict[str, list[Packed]]:
    """Each run's share of the limit, filled with its last evaluation, then its first, then the others from the end."""
    share = data.max_tokens // max(1, sum(bool(rollouts) for rollouts in packed.values()))
    kept = {}
    for name, rollouts in packed.items():
        steps = sorted({one.step for one in rollouts}, reverse=True)
        order = steps[:1] + steps[-1:] + steps[1:-1] if len(steps) > 1 else steps
        chosen, room = set(), share
        for place in sorted(range(len(rollouts)), key=lambda place: (order.index(rollouts[place].step), place)):
            if rollouts[place].length <= room:
                chosen.add(place)
                room -= rollouts[place].length
        kept[name] = [one for place, one in enumerate(rollouts) if place in chosen]
        if len(chosen) < len(rollouts):
            held = f"the token view holds {len(chosen)} of {len(rollouts)} kept rollouts, to keep the page small"
            data.notes.add(name, f"{held}: the last and the first evaluation come first; --max-tokens takes more")
    return kept
