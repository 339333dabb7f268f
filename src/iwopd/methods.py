"""The methods by name: what `recipes/`, the demo and `iwopd methods` call them."""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "opd": {},
    "iw-opd": {"weights": "cumulative-share", "params": {"gamma": 0.5}},
    "surrogate-only": {"weights": "cumulative-share", "params": {"blend": False}},
    "signed": {"weights": "signed", "params": {"gamma": 0.5}},
    "ideal": {"weights": "ideal", "params": {"alpha": 0.01}},
    "ideal-blend": {"weights": "ideal", "params": {"alpha": 0.01, "gamma": 0.5}},
    "fixed-prefix": {"weights": "fixed-prefix", "params": {"ratio": 0.3, "factor": 1.5}},
    "linear-decay": {"weights": "linear-decay", "params": {"gamma": 0.5}},
    "curriculum": {"weights": "curriculum", "params": {"start": 0.3, "end": 1.0, "schedule": "cosine", "factor": 1.5}},
    "prefix-30": {"weights": "prefix-only", "params": {"ratio": 0.3}},
    "suffix-30": {"weights": "suffix-only", "params": {"ratio": 0.3}},
    "exopd": {"advantage": "exopd", "scale": 1.25},
    "iw-exopd": {"advantage": "exopd", "scale": 1.25, "weights": "cumulative-share", "params": {"gamma": 0.5}},
    "survival": {"weights": "survival", "params": {"tau": 1.0}},
}
"""The `[method]` section of each: the paper's, and `survival`, which is ours."""

TITLES = {
    "opd": "OPD",
    "iw-opd": "IW-OPD",
    "surrogate-only": "Surrogate weight only",
    "signed": "Signed sum",
    "ideal": "Ideal weight only",
    "ideal-blend": "Ideal weight, OPD blend",
    "fixed-prefix": "Amplify fixed prefix",
    "linear-decay": "Linear decay",
    "curriculum": "Manual curriculum",
    "prefix-30": "Prefix-30",
    "suffix-30": "Suffix-30",
    "exopd": "ExOPD",
    "iw-exopd": "IW-ExOPD",
    "survival": "Survival (ours)",
}
