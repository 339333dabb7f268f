"""What went wrong in the runs, with what to do about it. The checks are those of `runs.alerts`, as on the console."""

from __future__ import annotations

from typing import Any

from iwopd.report.charts import Panel
from iwopd.report.gathering import Group, ReportData
from iwopd.runs.alerts import Alert, find_alerts


def build(data: ReportData) -> Panel | None:
    """None where nothing is wrong."""
    rows = [row for group in data.groups for row in _rows(group)]
    if not rows:
        return None
    return Panel("alerts", "Alerts", "", template="alerts.html.j2", context={"rows": rows}, boxed=True)


def _rows(group: Group) -> list[dict[str, Any]]:
    """One for each kind: the longest of the runs' alerts, and in how many runs there was one."""
    found: dict[str, list[tuple[str, Alert]]] = {}
    for run in group.runs:
        for alert in find_alerts(run.metrics):
            found.setdefault(alert.kind, []).append((run.name, alert))
    rows = []
    for those in found.values():
        names = list(dict.fromkeys(name for name, _ in those))
        name, alert = max(those, key=lambda one: one[1].last - one[1].since)
        more = len(those) - 1
        rows.append(
            {
                "label": group.label,
                "style": group.style,
                "alert": alert,
                "when": _when(alert),
                "where": "" if len(group.runs) == 1 else f"{len(names)} of {len(group.runs)} runs, here {name}",
                "again": f"{more} more time{'' if more == 1 else 's'}" if len(names) == 1 and more else "",
            }
        )
    return rows


def _when(alert: Alert) -> str:
    if alert.active:
        return f"since step {alert.since}"
    return f"at step {alert.since}" if alert.since == alert.last else f"in steps {alert.since} to {alert.last}"
