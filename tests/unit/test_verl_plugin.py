"""The method's way into verl: names, parameters, what is refused, and a registration that nobody can miss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo import evidence
from iwopd.algo.advantages import ADVANTAGES, Advantage
from iwopd.algo.registry import WEIGHT_RULES, WeightRule
from iwopd.cluster.verl import params
from iwopd.cluster.verl.carrying import EVIDENCE, carried
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import LOSS, Settings
from iwopd.config import Method
from iwopd.methods import METHODS
from waiting import PATIENCE

FORWARD_KL = {"objective": "divergence", "divergence": "forward-kl", "support": "top-k"}
with_verl = pytest.mark.filterwarnings("ignore")  # verl, Ray and their dependencies warn at import


# --- names and parameters, without verl -----------------------------------------------------------------------------


def test_every_rule_and_advantage_has_a_name() -> None:
    names = params.presets()
    for rule in WEIGHT_RULES:
        known = EVIDENCE.issuperset(WEIGHT_RULES[rule].needs)
        assert (params.loss_mode(Method(weights=rule)) in names) == known
        assert params.loss_mode(Method(weights=rule, advantage="exopd")) in names
    assert {"iwopd_power", "iwopd_iw_clipped", "iwopd_log_mix"} <= set(names)
    assert not {"iwopd_baseline", "iwopd_none"} & set(names)
    assert params.loss_mode(Method.model_validate(FORWARD_KL)) == "iwopd_forward_kl_top_k"
    assert params.loss_mode(Method.model_validate(METHODS["iw-opd"])) == "iw_opd"
    assert params.loss_mode(Method()) == "iwopd_uniform"
    assert params.loss_mode(Method(advantage="exopd")) == "iwopd_exopd"


@pytest.mark.parametrize("name", params.presets())
def test_a_name_alone_stands_for_a_method(name: str) -> None:
    settings = params.read_settings(name, None)
    assert settings.steps is None
    assert params.loss_mode(settings.method) == name or name == "iwopd_cumulative_share"


def test_which_methods_need_the_whole_batch() -> None:
    def reason(**values: Any) -> str | None:
        return Method(**values).made.needs_whole_batch

    need = {rule for rule in WEIGHT_RULES if reason(weights=rule)}
    assert need == {"ideal", "curriculum", "prefix-only", "suffix-only", "until-drift", "gated", "tip", "scope"}
    assert "mean" in (reason(weights="signed", params={"normalize": "mean-one"}) or "")


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("k1", None, "loss_mode is 'k1'.*none of ours"),
        ("iw_opd", {"weights": "signed"}, "loss_mode is 'iw_opd'.*describes 'iwopd_signed'"),
        ("iwopd_exopd", {"weights": "uniform"}, "describes 'iwopd_uniform'"),
        ("iw_opd", {"weights": "cumulative-share", "params": {"gama": 1}}, "no parameter 'gama'; did you mean 'gamma'"),
        ("iw_opd", {"weights": "cumulative-share", "lambda": 1}, "iwopd: .*no setting 'lambda'"),
        ("iw_opd", {"weights": "cumulative-share", "steps": 0}, "iwopd.steps is 0"),
        ("iw_opd", {"weights": "cumulative-share", "kl_coef": 0.1}, "method.kl_coef is 0.1, but verl drops"),
        ("iw_opd", {"weights": "cumulative-share", "advantage": "baseline"}, "'baseline'.* needs kl, and verl's"),
    ],
)
def test_a_wrong_table_is_refused_by_name(name: str, table: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(VerlError, match=message):
        params.read_settings(name, table)


@pytest.mark.parametrize("name", ["kl_coef", "entropy_coef"])
def test_terms_that_verl_drops_are_refused_before_the_launch(name: str) -> None:
    with pytest.raises(VerlError, match=f"method.{name} is 0.5"):
        params.overrides(Method(**{name: 0.5}), steps=3)


# --- through verl's own settings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def iw_opd() -> Any:
    from verl_support import method_config

    return method_config(Method.model_validate(METHODS["iw-opd"]), steps=7)


# --- what verl can carry --------------------------------------------------------------------------------------------


REFUSED = {
    "kl": "method.divergence is 'reverse-kl': verl makes the forward KL",
    "forward-kl": "method.support is 'full': verl's teacher sends its likeliest ids",
    "jsd": "method.divergence is 'jsd': verl makes the forward KL",
    "top-k-kl": "method.divergence is 'reverse-kl': verl makes the forward KL",
    "kl-survival": "method.divergence is 'reverse-kl': verl makes the forward KL",
    "kl-gated": "method.divergence is 'reverse-kl': verl makes the forward KL",
    "baseline": "advantage 'baseline'.* needs kl, and verl",
    "teacher-entropy": "weights 'teacher-entropy'.* needs teacher_entropy, and verl",
    "tip": "weights 'tip'.* needs kl, and verl",
    "prune": "weights 'prune'.* needs top_overlap, and verl",
}
"""Methods of the catalogue, and the words."""
CARRIED = [name for name in METHODS if name not in REFUSED]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_carried_or_refused_in_words(name: str) -> None:
    method = Method.model_validate(METHODS[name])
    if name in REFUSED:
        with pytest.raises(VerlError, match=REFUSED[name]):
            params.overrides(method, steps=3)
    else:
        assert f"{LOSS}.loss_mode={params.loss_mode(method)}" in params.overrides(method, steps=3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"support_of": "student"}, "method.support_of is 'student': verl's teacher cannot be asked for ids"),
        ({"support_of": "union"}, "method.support_of is 'union'"),
        ({"divergence": "skew-forward-kl"}, "method.divergence is 'skew-forward-kl'"),
        ({"weights": "survival"}, "method.weights is 'survival', which needs gap: .* not among them.*looks at no gap"),
        ({"weights": "cumulative-share"}, "method.weights is 'cumulative-share', which needs gap"),
    ],
)
def test_of_divergences_only_the_forward_kl_over_the_teachers_ids_is_carried(values: dict[str, Any], words: str) -> None:
    with pytest.raises(VerlError, match=words):
        carried(Method.model_validate(FORWARD_KL | values))
    carried(Method.model_validate(FORWARD_KL | {"weights": "linear-decay"}))


@pytest.mark.parametrize("asked", [name for name in evidence.EVIDENCE if name not in EVIDENCE])
def test_formulas_that_ask_for_more_than_verl_knows_are_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def asks(mask, gap, *, {asked}, k=3): return gap", scope)  # formulas ask by the names of their parameters
    monkeypatch.setitem(WEIGHT_RULES._items, "asks", WeightRule("asks", scope["asks"]))
    monkeypatch.setitem(ADVANTAGES._items, "asks", Advantage("asks", scope["asks"]))
    for values in ({"weights": "asks"}, {"advantage": "asks"}):
        with pytest.raises(VerlError, match=f"'asks'.* needs {asked}, and verl's distillation knows only"):
            carried(Method.model_validate(values))
    assert not {"iwopd_asks", "iwopd_iw_asks"} & set(params.presets())


def test_formulas_of_other_packages_are_carried_if_verl_has_their_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(gap: Tensor, student_entropy: Tensor, reference_logprobs: Tensor, progress: float) -> Tensor:
        return gap

    monkeypatch.setitem(ADVANTAGES._items, "asks", Advantage("asks", asks))
    given = params.overrides(Method(advantage="asks"), steps=3)
    assert {f"{LOSS}.loss_mode=iwopd_asks", "actor_rollout_ref.actor.use_kl_loss=true"} <= set(given)


@with_verl
@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        *(METHODS[name] for name in CARRIED),
        {"weights": "uniform", "dual_clip": float("inf"), "clip": 1e-5},
        {**FORWARD_KL, "k": 7, "weights": "linear-decay"},
    ],
)
def test_the_method_arrives_as_it_was_sent(values: dict[str, Any]) -> None:
    """Through Hydra's grammar and verl's way to build settings in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    from iwopd.cluster.verl.driver import check_driver
    from verl_support import method_config

    method = Method.model_validate(values)
    config = method_config(method, steps=7)
    assert check_driver(config) == Settings(method, 7)
    built = omega_conf_to_dataclass(config.distillation.distillation_loss)
    assert built.settings == Settings(method, 7)
    divergence = method.objective == "divergence"
    assert (built.loss_settings.use_topk, built.loss_settings.use_estimator) == (divergence, not divergence)
    assert not divergence or built.topk == 7


WRONG: dict[str, Any] = {
    "distillation.enabled": False,
    f"{LOSS}._target_": "verl.workers.config.DistillationLossConfig",
    f"{LOSS}.loss_mode": "k1",
    f"{LOSS}.use_policy_gradient": False,
    f"{LOSS}.use_task_rewards": True,
    f"{LOSS}.policy_loss_mode": "gspo",
    f"{LOSS}.loss_max_clamp": 10.0,
    f"{LOSS}.clip_ratio_low": 0.1,
    f"{LOSS}.clip_ratio_high": 0.28,
    f"{LOSS}.clip_ratio_c": 10.0,
    "trainer.use_v1": False,
    "trainer.v1.trainer_mode": "colocate_async",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.rollout.temperature": 0.7,
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "algorithm.use_kl_in_reward": True,
    "algorithm.rollout_correction.bypass_mode": True,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": True,
    "algorithm.rollout_correction.rollout_rs": "token_k1",
}


@with_verl
@pytest.mark.parametrize("name", WRONG)
def test_the_driver_refuses_by_name(iw_opd: Any, name: str) -> None:
    from omegaconf import OmegaConf

    from iwopd.cluster.verl.driver import check_driver

    config = iw_opd.copy()
    check_driver(config)
    OmegaConf.update(config, name, WRONG[name])
    with pytest.raises(VerlError, match=name.replace(".", r"\.")) as raised:
        check_driver(config)
    assert repr(WRONG[name]).lower() in str(raised.value).lower()


@with_verl
def test_another_version_of_verl_is_refused(iw_opd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from iwopd.cluster.verl import driver

    monkeypatch.setattr(params, "version", lambda _: "0.10.0")
    with pytest.raises(VerlError, match=r"verl 0.10.0 is installed.*0.9.1"):
        driver.check_driver(iw_opd)


# --- the loss -------------------------------------------------------------------------------------------------------


@with_verl
@pytest.mark.parametrize(
    ("values", "missing", "message"),
    [
        ({"weights": "signed"}, "old_log_probs", "no 'old_log_probs'"),
        ({"weights": "signed"}, "teacher_logprobs", "no 'teacher_logprobs'"),
        ({"advantage": "exopd"}, "ref_log_prob", "no 'ref_log_prob'.*use_kl_loss"),
        ({"weights": "ideal"}, None, "'ideal' cannot be computed in verl's loss.*other rollouts.*iwopd.cluster.verl.main"),
        ({"weights": "curriculum"}, None, "training progress"),
        ({"weights": "prefix-only"}, None, "denominator"),
    ],
)
def test_the_loss_refuses_by_name_what_it_cannot_see(values: dict[str, Any], missing: str | None, message: str) -> None:
    from iwopd.cluster.verl.losses import make_loss
    from verl_support import loss_settings, method_config, scores, verl_batch

    method = Method.model_validate(values)
    actor, distillation = loss_settings(method_config(method))
    data = verl_batch(scores(), threshold=5.0, reference=True)
    if missing:
        del data[missing]
    with pytest.raises(VerlError, match=message):
        make_loss(params.loss_mode(method))(actor, distillation, {}, data)


@with_verl
def test_with_verls_own_settings_the_name_is_the_method_and_all_else_is_checked() -> None:
    """What somebody gets who keeps verl's main program and sets the name of the loss by hand."""
    from iwopd.cluster.verl.losses import make_loss
    from verl_support import loss_settings, scores, verl_batch, verl_config

    given = scores()
    right = ["loss_mode=iwopd_fixed_prefix", "use_policy_gradient=true", "use_task_rewards=false"]
    for extra, fault in (([], None), (["loss_max_clamp=10"], "loss_max_clamp"), (["clip_ratio_high=0.28"], "clip_ratio_high")):
        actor, distillation = loss_settings(verl_config(*(f"{LOSS}.{item}" for item in right + extra)))
        data = verl_batch(given, threshold=5.0, reference=False)
        call = make_loss("iwopd_fixed_prefix")
        if fault is None:
            values, metrics = call(actor, distillation, {}, data)
            assert torch.equal(values[1, :2], (given["old"] - given["teacher"])[1, :2] * torch.tensor([1.5, 1.0]))
            assert not data["rollout_is_weights"].is_nested
            assert metrics["distillation/weights_max"].aggregate() == 1.5
        else:
            with pytest.raises(VerlError, match=fault):
                call(actor, distillation, {}, data)


@with_verl
def test_numbers_of_the_whole_batch_have_the_local_engines_names() -> None:
    from iwopd.cluster.verl.hook import before_the_split
    from verl_support import LENGTHS, scores, verl_batch

    given = scores()
    columns, metrics = before_the_split(
        verl_batch(given, threshold=5.0, reference=False), Settings(Method(weights="suffix-only")), 0.5
    )
    assert set(columns) == {"iwopd_advantages", "loss_mask"}
    supervised = int(columns["loss_mask"].values().sum())
    assert 0 < supervised < sum(LENGTHS)
    assert metrics["iwopd/tokens"] == supervised
    assert metrics["iwopd/kl/sampled"] == pytest.approx(
        float((given["old"] - given["teacher"])[given["mask"]].mean()), rel=1e-5
    )
    assert {"iwopd/weights/min", "iwopd/weights/max", "iwopd/position/weights/0", "iwopd/position/kl/9"} <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())


# --- registration, in processes of its own --------------------------------------------------------------------------

WITHOUT_PLUGINS = """
from verl.trainer.distillation.losses import *
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY as registry
assert "iw_opd" not in registry
if {taken}:
    register_distillation_loss(DistillationLossSettings(names=["iwopd_signed"], use_estimator=True))(print)
from iwopd.cluster.verl.lossconfig import LossConfig
LossConfig(loss_mode="iw_opd", use_task_rewards=False, loss_max_clamp=None)
assert "iwopd_signed" in registry
print("registered")
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables, timeout=PATIENCE)


@pytest.mark.slow
def test_a_plugin_that_verl_did_not_load_is_registered_where_the_settings_are_built() -> None:
    done = run("-c", WITHOUT_PLUGINS.format(taken=False), VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.stdout.endswith("registered\n"), done.stderr


@pytest.mark.slow
def test_a_failed_registration_is_an_error_with_its_cause() -> None:
    done = run("-c", WITHOUT_PLUGINS.format(taken=True), VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "VerlError: iwopd's losses could not be registered with verl on" in done.stderr
    assert "'iwopd_signed' is already registered" in done.stderr


@pytest.mark.slow
def test_the_program_ends_with_one_line_before_ray_starts(tmp_path: Path) -> None:
    done = run("-m", "iwopd.cluster.verl.main", "distillation.enabled=true", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("iwopd: ")]
    assert f"{LOSS}._target_ is 'verl.workers.config.DistillationLossConfig'" in line
    assert "Traceback" not in done.stderr
