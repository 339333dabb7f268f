"""The catalogue: every method by name, and everything that `iwopd methods` lists.

Objectives, advantages and weight rules describe themselves (`algo`), and so do horizons (`rollout`). A method is a `[method]`
section with a name: the paper's, `survival`, which is ours, and those of related papers. Recipes, demo, probe, report and verl
take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iwopd.algo.objectives import Objective
    from iwopd.rollout.horizons import Horizon

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
    "exopd": {"advantage": "exopd"},
    "iw-exopd": {"advantage": "exopd", "weights": "cumulative-share", "params": {"gamma": 0.5}},
    "survival": {"weights": "survival", "params": {"tau": 1.0}},
    "kl": {"objective": "divergence"},
    "forward-kl": {"objective": "divergence", "divergence": "forward-kl"},
    "jsd": {"objective": "divergence", "divergence": "jsd"},
    "top-k-kl": {"objective": "divergence", "support": "top-k", "k": 4},
    "kl-survival": {"objective": "divergence", "weights": "survival", "params": {"tau": 1.0}},
    "kl-gated": {"objective": "divergence", "weights": "gated", "params": {"tau": 1.0}},
    "until-drift": {"weights": "until-drift", "params": {"threshold": 2.0}},
    "survival-share": {"weights": "survival-share", "params": {"tau": 1.0, "gamma": 0.5}},
    "power": {"advantage": "power", "power": 5.0},
    "baseline": {"advantage": "baseline"},
    "clipped": {"advantage": "clipped"},
    "log-mix": {"advantage": "log-mix", "alpha": 0.1},
    "teacher-entropy": {"weights": "teacher-entropy", "params": {"tau": 0.8}},
    "tip": {"weights": "tip", "params": {"ratio": 0.5}},
    "prune": {"weights": "prune", "params": {"k": 4}},
    "sod": {"weights": "sod", "params": {"tokens": 8}},
    "rising": {"weights": "rising"},
}
"""The `[method]` section of each, as its recipe writes it."""

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
    "kl": "Reverse KL",
    "forward-kl": "Forward KL",
    "jsd": "Jensen-Shannon",
    "top-k-kl": "Reverse KL, top 4 ids",
    "kl-survival": "Reverse KL, survival (ours)",
    "kl-gated": "Reverse KL, gated (ours)",
    "until-drift": "Until the first drift (ours)",
    "survival-share": "Survival x share (ours)",
    "power": "PowerOPD's advantage",
    "baseline": "vOPD's advantage",
    "clipped": "REOPOLD's bound",
    "log-mix": "TOP-D's advantage",
    "teacher-entropy": "Unsure teacher (EOPD's gate)",
    "tip": "TIP's tokens",
    "prune": "Prune-OPD's weights",
    "sod": "SOD's weights, by segments",
    "rising": "Rising (PW-OPSD's weights)",
}

GAMMAS = (0.5, 1.0, 2.0, 4.0)
ALPHAS = (1.0, 0.1, 0.01, 0.001)
"""Of Fig. 4a-b."""


def probed_methods(gamma: float = 0.5) -> dict[str, tuple[str, dict[str, Any]]]:
    """Title and section of what the probe applies to its rollouts: weight rules, some with several parameters, and advantages.

    Plain OPD first; IW-OPD at several gammas (the asked one among them); rules without a method at their defaults.
    """
    from iwopd.algo import WEIGHT_RULES
    from iwopd.algo.objectives import make_objective

    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, section in METHODS.items():
        if "objective" in section or make_objective(section).needs_reference:  # a probe has none; divergences share the rules
            continue
        rule = section.get("weights", "uniform")
        if name == "iw-opd":
            for value in sorted({*GAMMAS, gamma} - {0.0}):
                found[f"iw-opd-{value:g}"] = (f"IW-OPD, gamma {value:g}", {"weights": rule, "params": {"gamma": value}})
        elif name == "ideal":
            for value in ALPHAS:
                found[f"ideal-{value:g}"] = (f"Ideal weight, alpha {value:g}", {"weights": rule, "params": {"alpha": value}})
        else:
            found[name] = (TITLES[name], section)
        if name == "linear-decay":
            found["linear-decay-4"] = ("Linear decay, gamma 4", {"weights": rule, "params": {"gamma": 4.0}})
    found["curriculum"] = ("Manual curriculum, first step", found["curriculum"][1])
    known = {section.get("weights", "uniform") for _, section in found.values()}
    more = {name: (WEIGHT_RULES[name].title or name, {"weights": name}) for name in WEIGHT_RULES if name not in known}
    return {**found, **more}


def identity(objective: Objective) -> tuple[Any, ...]:
    """What makes two objectives the same method: defaults filled in, the loss's clips and coefficients left out."""
    from iwopd.algo.advantages import ADVANTAGES

    weights = {**objective.rule.params, **objective.params}
    advantage = getattr(objective, "advantage", None)
    more = {} if advantage is None else {**ADVANTAGES[advantage].params, **getattr(objective, "advantage_params", {})}
    given = {name: getattr(objective, name) for name in type(objective).every_setting()}
    own = {name: given[name] for name in objective.settings(given) if name in objective.of_the_method}
    return objective.name, objective.weights, weights, advantage, more, own


def resolved(section: Mapping[str, Any]) -> dict[str, Any]:
    """A `[method]` section of any version as this one would write it: defaults filled in, what is not used left out."""
    from iwopd.algo.objectives import objective_class

    try:
        kind = objective_class(section)
        known = kind.settings(section)
    except (ValueError, TypeError, ImportError):  # of a plug-in that is not here, or damaged
        return dict(section)
    given = {name: value for name, value in section.items() if name in known}
    return {"objective": kind.name, **{name: one.default for name, one in known.items()}, **given}


def method_title(section: Mapping[str, Any]) -> str:
    """The name of a `[method]` section of any version; where it has none, what it is made of."""
    from iwopd.algo.objectives import make_objective

    whole = resolved(section)
    try:
        wanted = identity(make_objective(whole))
    except (ValueError, TypeError, ImportError):
        wanted = ()
    for name, own in METHODS.items():
        if identity(make_objective(own)) == wanted:
            return TITLES[name]
    usual = resolved({name: value for name, value in whole.items() if name in ("objective", "advantage")})
    params = whole.get("params", {})
    words = [str(whole["objective"])] if whole.get("objective", "policy-gradient") != "policy-gradient" else []
    words += [str(whole.get(name)) for name in ("advantage", "weights") if name in whole]
    words += [f"{name}={value}" for name, value in whole.items() if usual.get(name) != value and name not in _MADE_OF]
    return " ".join(words + [f"{name}={value}" for name, value in (params.items() if isinstance(params, Mapping) else ())])


_MADE_OF = ("advantage", "weights", "params")


def catalogue() -> dict[str, list[dict[str, Any]]]:
    """Everything that can be chosen, as plain values: `iwopd methods --json`. A plug-in that does not load says why."""
    from iwopd.algo import WEIGHT_RULES
    from iwopd.algo.advantages import ADVANTAGES
    from iwopd.algo.evidence import EVIDENCE, FOR_OBJECTIVES, FURTHER, TEACHER_DISTRIBUTION
    from iwopd.algo.objectives import OBJECTIVES
    from iwopd.rollout.horizons import HORIZONS

    def listed(registry: Mapping[str, Any], describe: Any) -> list[dict[str, Any]]:
        found = []
        for name in registry:
            try:
                found.append({"name": name, **describe(registry[name])})
            except (ImportError, TypeError) as error:
                nothing = {"formula": "", "source": "", "params": {}, "needs": [], "beside_logprobs": []}
                found.append({"name": name, "title": name, **nothing, "error": str(error)})
        return found

    def objective(kind: type[Objective]) -> dict[str, Any]:
        every = kind.every_setting()
        known = {**kind.settings({}), **{name: every[name] for name in kind.conditions}}
        settings = {name: one.default for name, one in known.items()}
        texts = {"name": kind.name, "title": kind.title, "formula": kind.formula, "source": kind.source}
        needs = sorted(kind().needs - {"mask"})
        further = [name for name in needs if name in (*FURTHER, TEACHER_DISTRIBUTION)]
        return {**texts, "params": settings, "needs": needs, "beside_logprobs": further}

    def horizon(kind: type[Horizon]) -> dict[str, Any]:
        fields = {info.alias or name: info for name, info in kind.model_fields.items()}
        defaults = {
            name: info.get_default(call_default_factory=True) for name, info in fields.items() if not info.is_required()
        }
        needed = [name for name, info in fields.items() if info.is_required()]
        texts = {"title": (kind.__doc__ or "").strip(), "formula": kind.formula, "source": kind.source}
        return {**texts, "params": defaults, "required": needed, "stops_online": kind.stops_online}

    return {
        "objectives": listed(OBJECTIVES, objective),
        "advantages": listed(ADVANTAGES, lambda one: one.describe()),
        "rules": listed(WEIGHT_RULES, lambda one: one.describe() | {"family": one.family}),
        "horizons": listed(HORIZONS, horizon),
        "methods": [{"name": name, "title": TITLES[name], "method": section} for name, section in METHODS.items()],
        "evidence": [
            {"name": name, "what": text, "beside_logprobs": name in (*FURTHER, *FOR_OBJECTIVES)}
            for name, text in (EVIDENCE | FOR_OBJECTIVES).items()
        ],
    }
