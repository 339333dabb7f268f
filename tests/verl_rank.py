"""One rank of verl's actor on given rollouts: `python verl_rank.py FOLDER`, with torchrun's variables. For test_verl_fsdp.

The worker is verl's own `ActorRolloutRefWorker` as its trainer builds it; this script is the trainer: it has the old log-probs
scored, adds rollout correction and signal to the whole batch, deals out the rows, and asks for the update.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested, response_to_nested

from iwopd.cluster.verl.adapter_shards import adapter_tensors
from iwopd.cluster.verl.driver import check_driver
from iwopd.cluster.verl.hook import before_the_split
from iwopd.train.scoring import training_progress


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    for name, overrides in job["methods"].items():
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=overrides)
        settings = check_driver(config)
        OmegaConf.resolve(config)
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor", distillation_config=config.distillation)
        worker.init_model()
        reference = None
        # As verl's trainer decides; with an adapter the actor without it is the reference.
        if config.actor_rollout_ref.actor.use_kl_loss and not config.actor_rollout_ref.model.lora_rank:
            reference = ActorRolloutRefWorker(config.actor_rollout_ref, role="ref")
            reference.init_model()
        losses = [update(worker, reference, config, settings, rollouts, step) for step, rollouts in enumerate(job["steps"], 1)]
        weights = {key: value.full_tensor().clone() for key, value in worker.actor.engine.module.named_parameters()}
        if config.actor_rollout_ref.model.lora_rank:
            weights = adapter_of(worker, folder / f"{name}-checkpoint" / "actor")
        if dist.get_rank() == 0:
            save_file(weights, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def adapter_of(worker: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What the launcher reads of a checkpoint; the rollout servers would be sent the same, by the same names."""
    worker.save_checkpoint(str(folder))
    dist.barrier()
    saved = adapter_tensors(folder)
    sent, settings = worker.actor.engine.get_per_tensor_param(base_sync_done=True)
    sent = dict(sent)
    assert settings["r"] == worker.config.model.lora_rank
    assert sent.keys() == saved.keys(), sent.keys() ^ saved.keys()
    assert all(torch.equal(sent[name], values) for name, values in saved.items())
    return saved


def update(
    worker: Any, reference: Any, config: Any, settings: Any, rollouts: list[dict[str, list[Any]]], step: int
) -> list[float]:
    """One step on these rollouts; returns the loss of each update."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    likeliest = config.distillation.distillation_loss.topk if settings.method.objective == "divergence" else 0
    batch = as_batch(rollouts, likeliest)
    rows = list(range(len(rollouts)))
    mine = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]

    scorers = {"old_log_probs": worker.compute_log_prob}
    if reference is not None:
        scorers["ref_log_prob"] = reference.compute_ref_log_prob
    elif config.actor_rollout_ref.actor.use_kl_loss:
        scorers["ref_log_prob"] = worker.compute_log_prob
    for name, score in scorers.items():
        scoring = tu.index_select_tensor_dict(batch, mine)
        tu.assign_non_tensor(scoring, calculate_entropy=False, compute_loss=False, temperature=1.0)
        if name == "ref_log_prob" and reference is None:
            tu.assign_non_tensor(scoring, no_lora_adapter=True)
        own = response_from_nested(score(scoring)["log_probs"], scoring["response_mask"])
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, [row.tolist() for row in own.unbind()])
        batch[name] = ragged([row for part in parts for row in part])

    columns = {name: batch[name].to_padded_tensor(0) for name in ("old_log_probs", "rollout_log_probs", "response_mask")}
    corrected, _ = compute_rollout_correction_and_add_to_batch(
        DataProto.from_single_dict(columns), config.algorithm.rollout_correction
    )
    if "rollout_is_weights" in corrected.batch:
        batch["rollout_is_weights"] = response_to_nested(corrected.batch["rollout_is_weights"], batch["response_mask"])
    batch["advantages"] = batch["rollout_log_probs"] * 0.0
    batch.update(before_the_split(batch, settings, training_progress(step, settings.steps))[0])

    actor = config.actor_rollout_ref.actor
    training = tu.index_select_tensor_dict(batch, mine)
    tu.assign_non_tensor(
        training,
        calculate_entropy=False,
        distillation_use_topk=likeliest > 0,
        distillation_only=likeliest > 0,  # as verl's trainer decides
        global_batch_size=actor.ppo_mini_batch_size,
        mini_batch_size=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        seed=actor.data_loader_seed,
        dataloader_kwargs={"shuffle": actor.shuffle},
        temperature=1.0,
    )
    metrics = tu.get(worker.update_actor(training), "metrics")
    return [float(value) for value in metrics["loss"]]


def as_batch(rollouts: list[dict[str, list[Any]]], likeliest: int) -> TensorDict:
    """The columns that verl's agent loop writes; `likeliest`: so many of the teacher's ids instead of the written tokens."""
    rows = [item["prompt"] + item["response"] for item in rollouts]

    def whole(name: str, filler: list[Any]) -> torch.Tensor:
        """As verl's teachers answer: entry t is about token t + 1, the last one is filler."""
        return ragged([[filler] * (len(item["prompt"]) - 1) + item[name] + [filler] for item in rollouts])

    columns = {
        "input_ids": ragged(rows),
        "position_ids": ragged([list(range(len(row))) for row in rows]),
        "prompts": ragged([item["prompt"] for item in rollouts]),
        "responses": ragged([item["response"] for item in rollouts]),
        "response_mask": ragged([[1] * len(item["response"]) for item in rollouts]),
        "loss_mask": ragged([[1] * len(item["response"]) for item in rollouts]),
        "rollout_log_probs": ragged([item["rollout_logprobs"] for item in rollouts]),
        "teacher_logprobs": whole("top_logprobs", [0.0] * likeliest) if likeliest else whole("teacher_logprobs", [0.0]),
    }
    if likeliest:
        columns["teacher_ids"] = whole("top_ids", [0] * likeliest).int()
    return TensorDict(columns, batch_size=len(rollouts))


def ragged(rows: list[list[Any]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
