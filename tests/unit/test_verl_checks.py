"""What is refused before Ray starts, and which GPUs go where."""

import json
from pathlib import Path
from typing import Any

import pytest

from iwopd.cluster.verl import job, launch, params
from iwopd.cluster.verl.checks import check_installed, check_other_teachers, check_settings, examine
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.job import check_size, ray_address
from iwopd.cluster.verl.pools import Pool, Pools, pools
from iwopd.config import Config, load_config, make_config
from iwopd.errors import UserError
from iwopd.tiny import build_tokenizer
from models import save_pair


def _config(cluster: dict[str, Any] | None = None, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "models": {"student": "org/student", "teacher": "org/teacher"},
        "data": {"prompts": "prompts.jsonl"},
        "rollout": {"max_tokens": 100, "prompts_per_step": 1024},
        "cluster": cluster or {},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return make_config(tree)


@pytest.mark.parametrize(
    ("cluster", "student", "teacher", "replicas"),
    [
        ({}, (1, 4), (1, 4), 4),  # half of one machine
        ({"nodes": 4}, (2, 8), (2, 8), 16),  # the paper's 32
        ({"nodes": 4, "teacher_gpus": 8, "teacher_tensor_parallel": 4}, (3, 8), (1, 8), 2),  # a whole machine
        ({"nodes": 4, "teacher_gpus": 4}, (4, 7), (4, 1), 4),  # one GPU of every machine
        ({"nodes": 1, "gpus_per_node": 3, "teacher_gpus": 1}, (1, 2), (1, 1), 1),
        ({"nodes": 3, "gpus_per_node": 2, "teacher_gpus": 2}, (2, 2), (1, 2), 2),
        ({"nodes": 4, "teacher_tensor_parallel": 16}, (2, 8), (2, 8), 1),  # a copy over two whole machines
    ],
)
def test_pools(cluster: dict[str, Any], student: tuple[int, int], teacher: tuple[int, int], replicas: int) -> None:
    assert pools(_config(cluster)) == Pools(Pool(*student), Pool(*teacher), replicas)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"gpus_per_node": 1}, "1 GPU, and student and teacher need one each"),
        ({"teacher_gpus": 8}, "teacher_gpus is 8 of 8 GPUs"),
        ({"nodes": 4, "teacher_gpus": 6}, "neither whole machines .multiples of 8. nor .*multiples of 4"),
        ({"teacher_gpus": 3, "teacher_tensor_parallel": 2}, "must fill it exactly.*multiple of 2"),
        ({"nodes": 2, "gpus_per_node": 6, "teacher_tensor_parallel": 3, "teacher_gpus": 4}, "must fill it exactly"),
        (
            {"nodes": 4, "gpus_per_node": 8, "teacher_gpus": 12, "teacher_tensor_parallel": 2},
            "a copy would span machines",
        ),
    ],
)
def test_pools_that_do_not_come_out_even(cluster: dict[str, Any], words: str) -> None:
    with pytest.raises(VerlError, match=words):
        pools(_config(cluster))


def test_several_teachers_share_the_pool() -> None:
    others = {"code": {"model": "org/coder"}}
    assert pools(_config({"teacher_tensor_parallel": 2}, teacher={"others": others})).teacher_replicas == 1
    with pytest.raises(VerlError, match="3 GPUs, but 2 teachers"):
        pools(_config({"teacher_gpus": 3}, teacher={"others": others}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cluster": {"nodes": 4, "teacher_gpus": 8}}, "1024 rollouts .* 24 ranks"),
        ({"cluster": {"teacher_gpus": 5}}, "1024 rollouts .* 3 ranks"),
        ({"optim": {"mini_batches": 3}}, "prompts_per_step is 1024, which optim.mini_batches = 3"),
        ({"rollout": {"max_tokens": None}}, "rollout.max_tokens is needed"),
        ({"lora": {"rank": 513}}, "lora.rank is 513: .*vLLM takes up to 512"),
        ({"lora": {"rank": 8, "alpha": 1.5}}, "lora.alpha is 1.5: .*a whole number"),
        ({"method": {"weights": "gated"}}, "weights 'gated'.* needs agreement"),
        ({"reward": {"checker": "nobody", "normalize": "none"}}, "reward.checker is 'nobody'"),
        (
            {
                "reward": {"checker": "exact", "normalize": "none"},
                "rollout": {"max_tokens": 100, "prompts_per_step": 1024, "horizon": {"type": "fixed", "tokens": 50}},
            },
            "reward.checker is 'exact': .*leave .rollout.horizon. out",
        ),
        ({"engine": {"vllm": {"max_model_len": 500}}}, "engine.vllm.max_model_len is 500, but .* is 2148"),
        ({"engine": {"vllm": {"tensor_parallel": 3}}}, "engine.vllm.tensor_parallel is 3, but the student has 4 GPUs"),
        ({"cluster": {"sequence_parallel": 3}}, "sequence_parallel is 3, but the student has 4 GPUs per machine"),
        ({"cluster": {"sequence_parallel": 2}, "models": {"attention": "sdpa"}}, "needs flash attention"),
        ({"models": {"student": "folder/model.gguf"}}, "models.student is 'folder/model.gguf': .*safetensors"),
        ({"teacher": {"others": {"default": {"model": "org/x"}}}}, "the name 'default' is the first teacher's"),
        ({"teacher": {"others": {"code": {"urls": ["http://gpu1:8000"]}}}}, r"teacher.others.code.urls is"),
        ({"teacher": {"others": {"code": {"model": "org/x", "system": "hm"}}}}, "teacher.others.code.system is 'hm'"),
        ({"cluster": {"overrides": ["nonsense"]}}, "overrides has 'nonsense'"),
        ({"cluster": {"overrides": ["distillation.distillation_loss.loss_max_clamp=10"]}}, "loss_max_clamp, which the recipe"),
        ({"cluster": {"overrides": ["+distillation.distillation_loss.x=1"]}}, "another method or teacher"),
        (
            {"cluster": {"overrides": ["++distillation.teacher_models.teacher_model={key:a}"]}},
            "teacher_model, which the recipe",
        ),
        ({"cluster": {"overrides": ["+distillation.teacher_models.more.key=a"]}}, "another method or teacher"),
        ({"cluster": {"overrides": ["actor_rollout_ref.rollout.temperature=0.7"]}}, "temperature, which the recipe"),
        ({"cluster": {"overrides": ["actor_rollout_ref.actor.optim={lr:1}"]}}, "actor.optim, which the recipe"),
    ],
)
def test_what_users_trip_over(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(VerlError, match=words):
        check_settings(_config(**sections))


def test_all_faults_are_told_at_once() -> None:
    faulty = _config(rollout={"temperature": 0.7, "top_p": 0.9}, lora={"rank": 8, "alpha": 1.5})
    with pytest.raises(VerlError) as caught:
        check_settings(faulty)
    assert len(str(caught.value).splitlines()) == 4


def test_overrides_that_may_be_set() -> None:
    check_settings(_config({"overrides": ["trainer.balance_batch=false", "data.dataloader_num_workers=2", "+a.b=1"]}))


def test_without_verl_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "verl" else object())
    with pytest.raises(VerlError, match=r"needs verl.*pip install 'iwopd\[verl\]'"):
        check_installed()


def test_another_version_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(params, "version", lambda name: "0.10.0")
    with pytest.raises(VerlError, match=r"verl 0.10.0 is installed.*verl==0.9.1"):
        check_installed()


def test_the_doctor_compares_tokenizers(tmp_path: Path) -> None:
    tree = save_pair(tmp_path)
    config = make_config({**tree, "rollout": {**tree["rollout"], "prompts_per_step": 8}})
    assert {finding.level for finding in examine(config, tmp_path / "run")} == {"pass"}
    other = build_tokenizer()
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    words = vocabulary["model"]["vocab"]
    words["3"], words["4"] = words["4"], words["3"]
    other.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(vocabulary))
    found = {(finding.level, finding.check) for finding in examine(config, tmp_path / "run")}
    assert ("fail", "vocabulary") in found
    several = make_config({**tree, "teacher": {"others": {"code": {"model": str(tmp_path / "teacher")}}}})
    with pytest.raises(UserError, match="tokenizer"):
        check_other_teachers(several, build_tokenizer())
    check_other_teachers(config, build_tokenizer())


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_address(None) == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_address(None) == "10.0.0.1:6379"
    assert ray_address("auto") == "auto"
    with pytest.raises(VerlError, match="ray job submit --address http://head:8265"):
        ray_address("http://head:8265")


def test_a_cluster_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job.STAND_IN, raising=False)
    with pytest.raises(VerlError, match="4 x 8 GPUs, but no Ray cluster is named"):
        check_size(_config({"nodes": 4}), "local")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(VerlError, match="1 x 8 GPUs, and this machine has 2"):
        check_size(_config(), "local")
    check_size(_config({"gpus_per_node": 2}), "local")
    monkeypatch.setattr(job, "_ask", lambda address: [8.0, 8.0, 0.0])
    with pytest.raises(VerlError, match=r"4 x 8 GPUs, but the machines .* have 8, 8, 0"):
        check_size(_config({"nodes": 4}), "auto")
    check_size(_config({"nodes": 2}), "auto")
    check_size(_config({"nodes": 4, "gpus_per_node": 4}), "auto")  # two on each large machine


@pytest.mark.slow
def test_no_ray_cluster_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "CONNECT", 15.0)
    with pytest.raises(VerlError, match=r"no Ray cluster answers at 127.0.0.1:1"):
        job._ask("127.0.0.1:1")


def test_every_recipe_can_run_on_the_papers_cluster_or_is_refused_in_words() -> None:
    recipes = sorted((Path(__file__).parents[2] / "src" / "iwopd" / "recipes").glob("*/*.toml"))
    assert len(recipes) > 50
    refused = {}
    for recipe in recipes:
        try:
            check_settings(load_config(recipe, {"cluster.nodes": 4, "cluster.gpus_per_node": 8}))
        except VerlError as error:
            refused[f"{recipe.parent.name}/{recipe.stem}"] = str(error)
    distributions = ["baseline", "forward-kl", "jsd", "kl", "kl-gated", "kl-survival", "prune", "teacher-entropy", "tip"]
    distributions.append("top-k-kl")
    mixed = {f"mix/{name}" for name in ("cold-start", "teacher-mix")}
    assert set(refused) == {f"tiny/{name}" for name in distributions} | mixed
    assert all("the local engine" in text for text in refused.values())


def test_more_ids_than_there_are_is_refused_before_a_run_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = save_pair(tmp_path)
    top = {"objective": "divergence", "divergence": "forward-kl", "support": "top-k", "k": 1000}
    config = make_config(
        {**tree, "method": top, "rollout": {**tree["rollout"], "prompts_per_step": 8}, "cluster": {"gpus_per_node": 2}}
    )
    monkeypatch.setattr(launch, "check_size", lambda *_: None)
    with pytest.raises(UserError, match=r"method\.k is 1000, but the vocabulary has 21 ids"):
        launch.run_on_verl(config, tmp_path / "run", doctor=False)
    assert not (tmp_path / "run").exists()
