"""The plan of this package's own trainer: several processes, sharded or not; objectives over whole distributions; answers of
others.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from iwopd import recipes
from iwopd.algo.objectives import make_objective
from iwopd.cli import main
from iwopd.cluster.plan import GPUS, Plan, PlanError, make_plan, open_workload, report
from iwopd.cluster.plan.estimate import step_time
from iwopd.cluster.plan.layout import local_layout
from iwopd.cluster.plan.rates import TYPICAL
from iwopd.cluster.plan.work import distribution_flops, gathered_bytes, reduced_bytes, update_flops
from iwopd.cluster.plan.workload import Workload
from iwopd.config import Optim, load_config
from iwopd.lm import ResponseModel
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.memory import ModelShape
from iwopd.train.micro_batch import Distributions
from iwopd.train.ranks import Ranks
from iwopd.train.scoring import evidence_of, loss_columns
from iwopd.types import Prompt, Rollout, ScoredRollout, TokenBatch

RECIPE = recipes.find("paper/qwen3-0.6b-from-qwen3-4b-instruct-2507-iw-opd-math")
H200 = GPUS["h200"]
FULL_KL = {"method__objective": "divergence", "method__divergence": "reverse-kl", "method__support": "full"}


def workload(mean: float = 2000.0, **settings: Any) -> Workload:
    plain = {"rollout.max_tokens": 4096, "method.params": {}, "method.weights": "uniform"}
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return open_workload(load_config(RECIPE, {**plain, **given}), mean)


def plan(gpus: int = 1, nodes: int = 1, **settings: Any) -> Plan:
    return make_plan(workload(**settings), H200, nodes, gpus, trainer="local")


def test_ranks_share_the_work() -> None:
    one, eight = plan(1), plan(8)
    assert (eight.layout.trainer, eight.layout.student_gpus, eight.gpus) == ("local", 8, 8)
    assert eight.typical.teacher == pytest.approx(one.typical.teacher / 8)
    assert eight.typical.update < one.typical.update / 4
    assert one.typical.rollout / 8 < eight.typical.rollout < one.typical.rollout  # each waits for its own longest answer
    assert "8 GPUs, a process on each (torchrun)" in report(eight)
    assert "on one GPU" in report(one)
    two_machines = plan(4, nodes=2)
    assert (two_machines.layout.nodes, two_machines.layout.gpus_per_node, two_machines.gpus) == (2, 4, 8)
    assert two_machines.layout.student_link == H200.network


def test_sharding_saves_memory_and_sends_more() -> None:
    plain, sharded = plan(8), plan(8, optim__shard=True)
    state = {name: plan_.layout.needs[0].parts for name, plan_ in (("plain", plain), ("sharded", sharded))}
    assert state["sharded"]["adam"] == pytest.approx(state["plain"]["adam"] / 8)
    assert "sharded" in report(sharded)
    slow = replace(H200, link=1e6)  # so slow that sending is all that counts
    work, cut = workload(), workload(optim__shard=True)
    seconds = [step_time(one, local_layout(one, slow, 8), TYPICAL).update for one in (work, cut)]
    tokens = sum(work.prompt + length for length in work.lengths(256)) * work.rollouts / 256
    passes = -(-int(tokens / 8) // work.micro_batch)
    link = 1e6 * TYPICAL.link
    assert seconds[0] == pytest.approx(reduced_bytes(work.student) * work.config.optim.mini_batches / link)
    assert seconds[1] == pytest.approx(
        passes * gathered_bytes(cut.student, cut.config.optim.gradient_checkpointing) / link, rel=0.02
    )


def test_what_does_not_fit_is_told_to_shard() -> None:
    small = replace(GPUS["l40s"], memory=30e9)
    settings = {"models__student": "Qwen/Qwen3-1.7B", "models__teacher_device": "cpu"}
    found = make_plan(workload(**settings), small, 1, 8, trainer="local")
    assert not found.fits
    assert "--optim.shard true" in found.fitting
    assert make_plan(workload(**settings, optim__shard=True), small, 1, 8, trainer="local").fits


def test_whole_distributions_cost_the_teachers_logits() -> None:
    sampled, kl = plan(), plan(**FULL_KL)
    assert kl.typical.update > sampled.typical.update
    assert kl.typical.rollout == sampled.typical.rollout
    work = workload(**FULL_KL)
    assert work.teacher_reads_again() == (work._most_tokens * work.teachers["teacher"].hidden * work.teacher_bytes > 2**31)
    few = workload(rollout__prompts_per_step=8, **FULL_KL)
    assert not few.teacher_reads_again()
    assert few.teacher_reads_again(ranks=8)  # several ranks keep nothing
    assert not workload().teacher_reads_again()


@pytest.mark.parametrize("kept", [True, False], ids=["states kept", "teacher reads again"])
def test_flops_of_whole_distributions_are_those_that_torch_counts(kept: bool) -> None:
    """Around the real learner, as bench/plan.py does it for the policy gradient; attention is counted whole."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def model(width: int) -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
        heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32}
        rest = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": True}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **rest, attn_implementation="eager"))  # type: ignore[arg-type, no-untyped-call]

    student, teacher = model(64), model(128).eval()
    scorer = LocalScorer(teacher)
    answer, prompt = 48, 16
    tokens = prompt + answer - 1
    counted = {}
    for name in ("sampled", "kl"):
        objective = make_objective({"objective": "divergence"} if name == "kl" else {})
        distributions = Distributions.of(scorer) if name == "kl" else None
        learner = Learner(ResponseModel(student), Optim(), objective, Ranks(), distributions)
        rollout = Rollout(Prompt("p", tuple(range(6, 6 + prompt))), torch.arange(answer) + 30, torch.zeros(answer), "length", 0)
        states = torch.zeros(answer, 128) if kept and name == "kl" else None
        scored = ScoredRollout(rollout, torch.full((answer,), -2.0), torch.full((answer,), -1.0), teacher_states=states)
        batch = TokenBatch.collate([scored])

        def update(learner: Learner = learner, batch: TokenBatch = batch) -> None:
            learner.update(batch, loss_columns(learner.objective, batch, evidence_of(batch)), seed=0, step=1)

        update()  # the first use of a model tries packing out

        def in_place(out: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
            return int(2 * left[0] * left[1] * right[1])

        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
            update()
        counted[name] = int(counter.get_total_flops())
    shape = ModelShape.of(teacher.config)
    rotary = 0 if kept else 2 * 16 * tokens  # the angles of the positions, which the formula leaves out
    expected = distribution_flops(shape, tokens, answer, again=not kept, causal=False)
    assert counted["kl"] - counted["sampled"] - rotary == pytest.approx(expected, rel=0.01)
    assert counted["kl"] > update_flops(ModelShape.of(student.config), tokens, answer, recompute=False, causal=False)


def test_answers_of_others() -> None:
    alone, data = plan(), plan(rollout__mix__share=0.5)
    work = workload(rollout__mix__share=0.5)
    assert (work.own, work.others) == (work.rollouts // 2, work.config.rollout.prompts_per_step // 2)
    assert data.typical.rollout < alone.typical.rollout
    assert data.typical.update == pytest.approx(alone.typical.update, rel=0.01)
    assert "the data set brings the answers to" in report(data)
    teacher = plan(rollout__mix__share=0.5, rollout__mix__source="teacher")
    assert teacher.typical.rollout > data.typical.rollout
    assert "the teacher writes the answers to" in report(teacher)
    start = workload(rollout__mix__share=1.0, rollout__mix__steps=10, steps=100)
    assert start.others_share == pytest.approx(0.1)
    all_of_it = plan(rollout__mix__share=1.0)
    assert all_of_it.typical.rollout == 0
    assert "mix " not in report(alone)


def test_verl_carries_no_answers_of_others() -> None:
    with pytest.raises(
        PlanError, match=r"rollout\.mix is set, and verl trains on what the student itself wrote.*--engine local"
    ):
        make_plan(workload(rollout__mix__share=0.5), H200, 1, 8)


def test_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(RECIPE), "--gpu", "h200", "--gpus-per-node", "4", "--engine", "local", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert (shown["engine"], shown["split"]["student_gpus"]) == ("local", 4)
