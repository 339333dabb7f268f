"""A recipe as verl's settings: nothing of it is lost, verl's own config knows every key, and the prompts come in our order."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.objectives import OBJECTIVES, Divergence, PolicyGradient
from iwopd.cluster.verl.checks import check_settings
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.evaluation import evaluated_tasks
from iwopd.cluster.verl.fields import FIELDS, table
from iwopd.cluster.verl.params import literal
from iwopd.cluster.verl.prompts import load_order, messages, write_prompts
from iwopd.cluster.verl.translate import environment_overrides, places, translate
from iwopd.config import Config, make_config, settings
from iwopd.data.fields import DataError
from iwopd.rollout.horizons import Fixed, Growing
from iwopd.types import Prompt

RECIPES = Path(__file__).parents[2] / "src" / "iwopd" / "recipes"
BASE: dict[str, Any] = {
    "models": {"student": "org/student", "teacher": "org/teacher"},
    "data": {"prompts": "prompts.jsonl"},
    "rollout": {"max_tokens": 100, "prompts_per_step": 48},
}
WORLD: dict[str, Any] = {"models": {"world": "clean"}, "rollout": {"prompts_per_step": 48}}

FORWARD_KL = {"objective": "divergence", "divergence": "forward-kl", "support": "top-k"}
OTHER: dict[str, Any] = {
    "seed": 3,
    "steps": 7,
    "rank_timeout": 60.0,
    "threads": 2,
    "precision": "bf16",
    "head_precision": "tf32",
    "models.world": "drift",
    "models.student_size": "large",
    "models.teacher_size": "weak",
    "models.teacher_tokenizer": "pieces",
    "models.lineage": 1,
    "models.student": "org/other",
    "models.teacher": "org/other",
    "models.reference": "org/other",
    "models.student_gguf_file": "a.gguf",
    "models.teacher_gguf_file": "a.gguf",
    "models.reference_gguf_file": "a.gguf",
    "models.student_revision": "abc",
    "models.teacher_revision": "abc",
    "models.reference_revision": "abc",
    "models.dtype": "bfloat16",
    "models.teacher_dtype": "bfloat16",
    "models.attention": "sdpa",
    "models.teacher_device": "cuda:1",
    "models.teacher_offload": True,
    "models.teacher_quantize": "int8",
    "models.trust_remote_code": True,
    "teacher.source": "live",
    "reference.source": "ema",
    "ema.decay": 0.5,
    "ema.device": "cpu",
    "lora.rank": 8,
    "lora.alpha": 16.0,
    "lora.targets": ["q_proj"],
    "lora.quantize": "4bit",
    "data.max_prompt_tokens": 64,
    "data.chat_template": "{{ messages }}",
    "data.chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
    "data.prefill": "So",
    "method.objective": "of-another-kind",
    "method.advantage": "exopd",
    "method.weights": "linear-decay",
    "method.params": {"normalize": "mean-one"},
    "method.scale": 1.5,
    "method.weighting": "advantage",
    "method.power": 0.5,
    "method.low": -1.0,
    "method.high": 1.0,
    "method.future": True,
    "method.clip": 0.3,
    "method.dual_clip": 4.0,
    "method.correction_threshold": 2.0,
    "method.entropy_coef": 0.1,
    "method.kl_coef": 0.1,
    "method.divergence": "reverse-kl",
    "method.support": "full",
    "method.support_of": "union",
    "method.k": 7,
    "method.beta": 0.2,
    "method.alpha": 0.2,
    "reward.checker": "exact",
    "reward.coefficient": 0.5,
    "reward.normalize": "mean",
    "reward.timeout": 60.0,
    "reward.workers": 3,
    "rollout.engine": "server",
    "rollout.prompts_per_step": 96,
    "rollout.samples": 2,
    "rollout.max_tokens": 50,
    "rollout.mix.share": 0.5,
    "rollout.mix.steps": 3,
    "rollout.mix.afterwards": 0.5,
    "rollout.mix.source": "teacher",
    "rollout.mix.field": "solution",
    "rollout.mix.temperature": 0.5,
    "rollout.mix.objective": "forward-kl",
    "rollout.mix.coefficient": 2.0,
    "rollout.temperature": 0.7,
    "rollout.top_p": 0.9,
    "rollout.top_k": 20,
    "rollout.stop_tokens": ["<end>"],
    "rollout.truncated": "mask",
    "rollout.thinking": "only",
    "rollout.overlap": False,
    "engine.vllm.dtype": "float16",
    "engine.vllm.max_model_len": 4096,
    "engine.vllm.memory_share": 0.6,
    "engine.vllm.cache_gb": 2.0,
    "engine.vllm.tensor_parallel": 2,
    "engine.vllm.eager": True,
    "engine.vllm.sleep": True,
    "engine.server.url": "http://gpu1:8000",
    "engine.server.name": "student",
    "engine.server.dtype": "float16",
    "engine.server.weights_folder": "/weights",
    "engine.server.api_key_env": "KEY",
    "engine.server.max_in_flight": 3,
    "engine.server.request_timeout": 3.0,
    "engine.server.patience": 3.0,
    "rollout.mismatch_limit": 0.1,
    "optim.lr": 3e-5,
    "optim.betas": (0.8, 0.9),
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.1,
    "optim.grad_clip": 0.5,
    "optim.ppo_epochs": 2,
    "optim.mini_batches": 2,
    "optim.token_budget": 100_000,
    "optim.gradient_checkpointing": True,
    "optim.shard": True,
    "eval.every": 3,
    "eval.tasks": ["aime24"],
    "eval.prompts": 0,
    "eval.samples": 3,
    "eval.chat_template_kwargs": {"enable_thinking": True},
    "eval.temperature": 0.5,
    "eval.max_tokens": 30,
    "eval.kept_rollouts": 1,
    "checkpoint.every": 3,
    "checkpoint.keep": 5,
    "checkpoint.best": "aime24",
    "tracking.project": "other",
    "teacher.urls": ["http://gpu1:8000"],
    "teacher.name": "teacher",
    "teacher.dialect": "sglang",
    "teacher.api_key_env": "KEY",
    "teacher.max_in_flight": 3,
    "teacher.tokens_per_request": 3,
    "teacher.request_timeout": 3.0,
    "teacher.patience": 3.0,
    "teacher.deadline": 3.0,
    "rollout.horizon.type": "drift",
    "teacher.tokenizer": "org/another",
    "teacher.system": "You know better.",
    "teacher.user": "{prompt} ({answer})",
    "teacher.chat_template": "{{ messages }}",
    "teacher.chat_template_kwargs": {"enable_thinking": True},
    "teacher.cache": "kept",
    "teacher.cache_gb": 1.0,
    "teacher.others": {"code": {"model": "org/coder"}},
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 16,
    "cluster.teacher_gpus": 2,
    "cluster.teacher_tensor_parallel": 2,
    "cluster.teacher_memory_share": 0.5,
    "cluster.backend": "sglang",
    "cluster.strategy": "fsdp",
    "cluster.sequence_parallel": 2,
    "cluster.offload": True,
    "cluster.save_hf": False,
    "cluster.checkpoints": "/shared/checkpoints",
    "cluster.overrides": ["trainer.balance_batch=false"],
}
"""Another value than the default for every setting that is mapped, unused or limited."""
COMPANIONS: dict[str | None, dict[str, Any]] = {
    "models.student_size": WORLD,
    "models.teacher_size": WORLD,
    "models.teacher_tokenizer": WORLD,
    "models.lineage": WORLD,
    "models.reference_gguf_file": {"models": {"reference": "org/student"}},
    "models.reference_revision": {"models": {"reference": "org/student"}},
    "teacher.source": {"models": {"teacher": None}, "teacher": {"user": "{prompt} {answer}"}},
    "teacher.dialect": {"teacher": {"urls": ["http://gpu1:8000"]}},
    **{f"lora.{name}": {"lora": {"rank": 8}} for name in ("alpha", "targets", "quantize")},
    "method.scale": {"method": {"advantage": "exopd"}},
    "method.weighting": {"method": {"advantage": "exopd"}},
    "method.power": {"method": {"advantage": "power"}},
    **{f"method.{name}": {"method": {"advantage": "clipped"}} for name in ("low", "high")},
    "method.future": {"method": {"advantage": "log-mix"}},
    **{f"method.{name}": {"method": FORWARD_KL} for name in ("divergence", "support", "support_of", "k")},
    "method.beta": {"method": FORWARD_KL | {"divergence": "jsd"}},
    "method.alpha": {"method": FORWARD_KL | {"divergence": "skew-forward-kl"}},
    "reward.checker": {"rollout": {"samples": 2}},
    **{
        f"reward.{name}": {"reward": {"checker": "math"}, "rollout": {"samples": 2}}
        for name in ("coefficient", "normalize", "timeout", "workers")
    },
    "eval.every": {"eval": {"tasks": ["aime24"]}},
    "eval.prompts": WORLD,
    "rollout.mix.afterwards": {"rollout": {"mix": {"steps": 3}}},
    "rollout.engine": {"engine": {"server": {"url": "http://gpu1:8000", "weights_folder": "/weights"}}},
}


class OfAnotherKind(PolicyGradient):
    """An objective that is not ours to carry."""

    name = "of-another-kind"


@pytest.fixture(autouse=True)
def _another_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES._items, OfAnotherKind.name, OfAnotherKind)


def _config(name: str | None = None, *, changed: bool = True) -> Config:
    """With another value of the setting `name`, and what must be beside it; without `changed`, with that alone."""
    tree = json.loads(json.dumps(WORLD if name == "models.world" or COMPANIONS.get(name) is WORLD else BASE))
    for section, values in COMPANIONS.get(name, {}).items():
        tree.setdefault(section, {}).update(json.loads(json.dumps(values)))
    if name is not None and changed:
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = OTHER[name]
    return make_config(tree)


def _overrides(config: Config) -> list[str]:
    return translate(config, places(config, Path("/runs/a")))


def _names(kind: str) -> list[str]:
    return [name for name, treatment in FIELDS.items() if treatment.kind == kind]


def test_every_setting_has_a_treatment() -> None:
    assert list(FIELDS) != []
    of_advantages = (name for advantage in ADVANTAGES for name in PolicyGradient.settings({"advantage": advantage}))
    method = {f"method.{name}" for name in (*of_advantages, *Divergence.every_setting())}
    horizon = {f"rollout.horizon.{info.alias or name}" for one in (Fixed, Growing) for name, info in one.model_fields.items()}
    assert {name for name, _ in settings()} | method | horizon == set(FIELDS)
    assert all(treatment.text and (treatment.kind != "only" or treatment.allowed is not None) for treatment in FIELDS.values())


@pytest.mark.parametrize("name", _names("mapped"))
def test_a_mapped_setting_reaches_verl(name: str) -> None:
    assert _overrides(_config(name)) != _overrides(_config(name, changed=False))


def test_a_template_is_given_the_same_names_and_values() -> None:
    carried = [item for item in _overrides(_config("data.chat_template_kwargs")) if "apply_chat_template_kwargs" in item]
    names = "+data.apply_chat_template_kwargs"
    assert carried == [f"{names}.enable_thinking=true", f"{names}.reasoning_effort=low"]


@pytest.mark.parametrize("name", _names("unused"))
def test_an_unused_setting_changes_nothing(name: str) -> None:
    assert _overrides(_config(name)) == _overrides(_config())
    check_settings(_config(name))


@pytest.mark.parametrize("name", _names("only"))
def test_what_verl_cannot_do_is_refused_by_name(name: str) -> None:
    with pytest.raises(VerlError) as caught:
        check_settings(_config(name))
    lines = [line for line in str(caught.value).splitlines() if line.strip().startswith(f"{name} is")]
    assert len(lines) == 1
    assert FIELDS[name].text in lines[0]
    check_settings(_config())  # the default is fine


def test_a_setting_that_two_objectives_share_is_refused_of_one_alone() -> None:
    """`alpha` is also the advantage log-mix's."""
    config = make_config(BASE | {"method": {"advantage": "log-mix", "alpha": 0.2}})
    check_settings(config)
    assert "+distillation.distillation_loss.iwopd.alpha=0.2" in _overrides(config)


def test_values_in_hydras_grammar() -> None:
    values = {"a b": '"a b"', "a/b.c-d": "a/b.c-d", "1": '"1"', "null": '"null"', "ü": '"ü"', "it's": '"it\'s"'}
    assert {value: literal(value) for value in values} == values
    assert literal({"a": [1, None, True], "b": 1e-05}) == "{a:[1,null,true],b:1e-05}"
    assert environment_overrides({"A": "1"}) == ['+ray_kwargs.ray_init.runtime_env.env_vars.A="1"']


COMPOSE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import RolloutConfig

results = []
for overrides in json.load(sys.stdin):
    with initialize_config_module("verl.trainer.config", version_base=None):
        tree = compose("ppo_trainer", overrides)
    critic, reference = need_critic(tree), need_reference_policy(tree)
    validate_config(tree, reference, critic)
    actor = omega_conf_to_dataclass(tree.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(tree.actor_rollout_ref.rollout)
    teachers = omega_conf_to_dataclass(tree.distillation).teacher_models
    results.append({
        "tree": OmegaConf.to_container(tree, resolve=True),
        "critic": critic, "reference": reference, "lora_only": actor.checkpoint.save_lora_only,
        "betas": list(actor.optim.betas), "eps": actor.optim.override_optimizer_config["eps"],
        "strategy": actor.engine.strategy, "mixed": dict(actor.engine.mixed_precision), "response": rollout.response_length,
        "teachers": {key: [t.model_path, t.num_replicas, t.inference.name, t.inference.max_model_len]
                     for key, t in teachers.items()},
    })
print("RESULT" + json.dumps(results, default=str))
"""


@pytest.mark.slow
def test_verls_own_config_knows_every_key() -> None:
    paper = "paper/qwen3-1.7b-from-qwen3-30b-a3b-instruct-2507-iw-exopd-math.toml"
    from iwopd.config import load_config

    configs = [
        load_config(RECIPES / paper, {"cluster.nodes": 4}),
        load_config(RECIPES / "tiny" / "iw-opd.toml", {"cluster.gpus_per_node": 2}),
        _config("teacher.others"),
        make_config(
            {**BASE, "lora": {"rank": 8, "targets": ["q_proj"]}, "cluster": {"backend": "sglang"}}
        ),  # vLLM is asked else
        _config("reward.workers"),
        _config("data.chat_template"),
        *(_config(name) for name in ("models.attention", "cluster.offload", "method.weights", "cluster.overrides")),
    ]
    given = [[*_overrides(config), *environment_overrides({"A": "1"})] for config in configs]
    environment = {name: value for name, value in os.environ.items() if name != "IWOPD_VERL_CPU"}
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE], input=json.dumps(given), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    math, tiny, several, adapter, rewarded, template, *_ = json.loads(done.stdout.partition("RESULT")[2])
    trained = adapter["tree"]["actor_rollout_ref"]
    assert (trained["model"]["lora_rank"], trained["model"]["target_modules"]) == (8, ["q_proj"])
    assert trained["actor"]["checkpoint"]["save_contents"] == ["model", "optimizer", "extra"]
    assert adapter["lora_only"]
    assert not math["lora_only"]
    judges = rewarded["tree"]["reward"]["custom_reward_function"]
    assert (judges["name"], judges["reward_kwargs"]) == ("judge", {"checker": "math", "timeout": 120.0, "workers": 3})
    assert rewarded["tree"]["distillation"]["distillation_loss"]["iwopd"]["reward"]["coefficient"] == 1.0
    assert template["tree"]["actor_rollout_ref"]["model"]["tokenizer_path"] == "/runs/a/verl/tokenizer"
    assert math["reference"]
    assert not any(result["critic"] for result in (math, tiny, several))
    assert not tiny["reference"]
    assert math["teachers"] == {"default": ["Qwen/Qwen3-30B-A3B-Instruct-2507", 16, "vllm", 2048 + 16384 + 1]}
    assert several["teachers"] == {
        "default": ["org/teacher", 2, "vllm", 2149],
        "code": ["org/coder", 2, "vllm", 2149],
    }
    tree = math["tree"]
    assert (tree["trainer"]["nnodes"], tree["trainer"]["n_gpus_per_node"]) == (2, 8)
    assert (tree["distillation"]["nnodes"], tree["distillation"]["n_gpus_per_node"]) == (2, 8)
    assert (math["betas"], math["eps"], math["strategy"]) == ([0.9, 0.999], 1e-8, "fsdp2")
    assert math["mixed"] == {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert tiny["mixed"]["param_dtype"] == "fp32"
    assert math["response"] == 16384
    loss = tree["distillation"]["distillation_loss"]
    wanted = {"use_policy_gradient": True, "use_task_rewards": False, "loss_max_clamp": None, "clip_ratio_c": 3.0}
    assert {name: loss[name] for name in wanted} == wanted
    correction = tree["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_is_threshold"]) == ("token", 5.0)
    actor = tree["actor_rollout_ref"]["actor"]
    assert (actor["loss_agg_mode"], actor["entropy_coeff"], actor["optim"]["lr"]) == ("token-mean", 0, 1e-5)
    assert tree["data"]["apply_chat_template_kwargs"] == {"enable_thinking": False}
    assert (tree["data"]["shuffle"], tree["data"]["truncation"]) == (False, "error")
    assert tree["trainer"]["total_training_steps"] == 165


def test_the_file_of_prompts_has_the_local_order(tmp_path: Path) -> None:
    config = make_config({**WORLD, "steps": 40, "data": {"train_size": 150}})
    order, tokenizer = load_order(config, lambda _: None)
    where = places(config, tmp_path)
    write_prompts(config, order, tokenizer, where)
    rows = pq.read_table(where.train_file).to_pylist()
    assert len(rows) == 40 * 48  # more than one epoch, more than one part of the file
    for step in (1, 2, 17, 40):
        part = rows[(step - 1) * 48 : step * 48]
        assert [row["extra_info"]["id"] for row in part] == [prompt.id for prompt in order.batch(step)]
        assert {row["extra_info"]["step"] for row in part} == {step}
        for row, prompt in zip(part, order.batch(step), strict=True):
            rendered = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, enable_thinking=False)
            assert tuple(rendered["input_ids"]) == prompt.token_ids
    assert {row["teacher"] for row in rows} == {"default"}
    assert len(pq.read_table(where.val_file)) == 1
    assert [path.name for path in where.folder.glob(".tmp*")] == []


def test_horizons_stand_in_the_rows(tmp_path: Path) -> None:
    """Of training: an evaluation's answers are written to the end."""
    for horizon, limits in (
        ({"type": "fixed", "tokens": 20}, [20, 20, 20, 20]),
        ({"type": "growing", "from": 10, "to": 40}, [10, 20, 30, 40]),
        ({"type": "growing", "from": 10}, [10, 40, 70, 100]),
        ({"type": "full"}, [0, 0, 0, 0]),
    ):
        config = make_config({**WORLD, "steps": 4, "rollout": {**BASE["rollout"], "horizon": horizon}})
        check_settings(config)
        order, tokenizer = load_order(config, lambda _: None)
        where = places(config, tmp_path / str(horizon["type"]))
        tasks = evaluated_tasks(config, tokenizer)
        write_prompts(config, order, tokenizer, where, tasks)
        rows = pq.read_table(where.train_file).to_pylist()
        assert [rows[48 * step]["extra_info"]["limit"] for step in range(4)] == limits
        assert {row["extra_info"]["limit"] for row in pq.read_table(where.val_file).to_pylist()} == {0}
        given = dict(item.split("=", 1) for item in _overrides(config))
        key = "actor_rollout_ref.rollout.agent.default_agent_loop"
        assert given.get(key) == (None if horizon["type"] == "full" else "iwopd_limited")
        assert given["data.max_response_length"] == "100"
        assert where.agent_loops.exists() == (horizon["type"] != "full")


def test_horizons_that_verl_cannot_hold() -> None:
    for horizon in ({"type": "drift"}, {"type": "budget", "tokens": 10_000}):
        config = make_config({**BASE, "rollout": {**BASE["rollout"], "horizon": horizon}})
        with pytest.raises(VerlError, match=rf"rollout\.horizon\.type is '{horizon['type']}': verl's teacher sees answers"):
            check_settings(config)
    world = make_config({**WORLD, "rollout": {"horizon": {"type": "fixed", "tokens": 500}}})
    with pytest.raises(VerlError, match=r"rollout\.horizon: tokens is 500, longer than an answer can be \(80"):
        check_settings(world)


def test_prompts_that_verl_cannot_have_are_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2"}]
    assert messages(Prompt("a", (1,), metadata={"messages": chat})) == chat
    with pytest.raises(DataError, match=r"'a'.*role and text"):
        messages(Prompt("a", (1,), metadata={"messages": [{"role": "user", "content": "x", "name": "y"}]}))
    with pytest.raises(DataError, match=r"'a'.*not a chat"):
        messages(Prompt("a", (1,)))
    config = make_config(WORLD)
    order, tokenizer = load_order(config, lambda _: None)
    order.prompts = [Prompt(p.id, p.token_ids, teacher="nobody", metadata=p.metadata) for p in order.prompts]
    with pytest.raises(DataError, match=r"'nobody'.*\['default'\]"):
        write_prompts(config, order, tokenizer, places(config, tmp_path))
    order.prompts = [Prompt(p.id, (*p.token_ids, 3), metadata=p.metadata) for p in order.prompts]
    with pytest.raises(DataError, match="13 ids here and 12"):
        write_prompts(config, order, tokenizer, places(config, tmp_path))


DOCS = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("dtype", "gathered"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_trained_weights_have_float32_shards(dtype: str, gathered: str) -> None:
    config = make_config({**BASE, "models": {**BASE["models"], "dtype": dtype}})
    given = dict(item.split("=", 1) for item in _overrides(config))
    assert given["actor_rollout_ref.actor.fsdp_config.model_dtype"] == "fp32"
    assert given["actor_rollout_ref.ref.fsdp_config.model_dtype"] == gathered
    assert f"param_dtype:{gathered}" in given["+actor_rollout_ref.actor.fsdp_config.mixed_precision"].replace('"', "")


def test_the_documentation_has_the_table() -> None:
    assert table() in DOCS, "docs/cluster.md is behind: see fields.table()"
