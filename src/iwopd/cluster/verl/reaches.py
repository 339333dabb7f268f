"""What we use of verl: the one list. `compatibility.py` compares another version with it; tests keep it complete.

A test collects what `src/` imports from verl and every setting that the launcher writes, and fails for one that is not here.
To move to another version: docs/cluster.md, "The next version of verl".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERL = "0.9.1"
"""The version that the entries below describe, and the one that is tested."""


@dataclass(frozen=True)
class Reach:
    """A function or class of verl."""

    why: str
    signature: str
    """Parameters with defaults; bases and fields of a class; `=` of a variable."""
    body: str = ""
    """Digest of its source, where what it computes matters to us; empty: only that it is there, with these parameters."""


NAMES: Mapping[str, Reach] = {
    "verl.trainer.distillation.losses.DistillationLossSettings": Reach(
        "made for every loss of ours", "(BaseConfig) names use_topk use_estimator"
    ),
    "verl.trainer.distillation.losses.register_distillation_loss": Reach("registers our losses", "(loss_settings)", "c8881ec3"),
    "verl.trainer.distillation.losses.DISTILLATION_LOSS_REGISTRY": Reach("looked at, to verify the registration", "="),
    "verl.trainer.distillation.losses.distillation_ppo_loss": Reach(
        "calls our loss, and decides what its result becomes",
        "(config, distillation_config, model_output=None, data=None, dp_group=None, student_logits=None, data_format='thd')",
        "6841c9e6",
    ),
    "verl.trainer.distillation.losses.distillation_loss": Reach(
        "turns our result into advantages; does not pad rollout_is_weights",
        "(config, distillation_config, model_output, data)",
        "1ac45852",
    ),
    "verl.trainer.distillation.losses.compute_topk_loss": Reach(
        "the forward KL over the teacher's ids; must know fsdp2",
        "(config, distillation_config, data, student_logits, data_format)",
        "a06a0821",
    ),
    "verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk": Reach(
        "the sum over ids that our forward KL completes",
        "(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format)",
        "a17c9fac",
    ),
    "verl.trainer.ppo.core_algos.compute_policy_loss_vanilla": Reach(
        "the clipped policy loss of the method",
        "(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='token-mean', config=None, rollout_is_weights=None)",
        "f9db11f7",
    ),
    "verl.trainer.ppo.core_algos.agg_loss": Reach(
        "one denominator for all tokens of an update",
        "(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)",
        "de10b504",
    ),
    "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_add_to_batch": Reach(
        "the rollout correction", "(batch, rollout_corr_config)", "9fb73499"
    ),
    "verl.workers.config.DistillationLossConfig": Reach(
        "the base of our LossConfig",
        "(BaseConfig) loss_mode topk use_task_rewards distillation_loss_coef loss_max_clamp log_prob_min_clamp "
        "use_chunked_topk chunked_topk_chunk_size use_policy_gradient policy_loss_mode clip_ratio clip_ratio_low "
        "clip_ratio_high global_batch_info loss_settings",
        "6681882d",
    ),
    "verl.workers.utils.padding.no_padding_2_padding": Reach(
        "reads the teacher's log-probs and the masses", "(tensor, data)", "4cf4d184"
    ),
    "verl.workers.utils.padding.response_to_nested": Reach("writes our columns", "(tensor, response_mask)", "3b0c4685"),
    "verl.utils.metric.Metric": Reach("our metrics of a micro-batch", "()"),
    "verl.utils.metric.Metric.__init__": Reach("our metrics of a micro-batch", "(self, aggregation, value=None)"),
    "verl.utils.metric.AggregationType": Reach("MEAN, MIN and MAX of our metrics", "(Enum)", "360e2a96"),
    "verl.trainer.main_ppo.run_ppo": Reach("started by our main program", "(config, task_runner_class)", "95316c88"),
    "verl.trainer.main_ppo.TaskRunnerV1": Reach("the base of our task runner", "()"),
    "verl.trainer.main_ppo.TaskRunnerV1.run": Reach("overridden", "(self, config)", "c15b3f90"),
    "verl.trainer.ppo.v1.register_trainer": Reach("registers our trainer", "(name)"),
    "verl.trainer.ppo.v1.PPOTrainerSync": Reach("the base of our trainer", "(PPOTrainer)", "5932c618"),
    "verl.trainer.ppo.v1.PPOTrainer.__init__": Reach("called by ours, which needs replay_buffer", "(self, config)", "348211b5"),
    "verl.trainer.ppo.v1.PPOTrainer.fit": Reach(
        "verl's own loop: where a stop can save", "(self, agent_loop_manager)", "4cb374b9"
    ),
    "verl.trainer.ppo.v1.PPOTrainer.prepare_step": Reach("the start of a step: where a stop can save", "(self)", "f315301e"),
    "verl.trainer.ppo.v1.PPOTrainer._validate": Reach("an evaluation, which a stop leaves out", "(self)"),
    "verl.trainer.ppo.v1.PPOTrainer._step_once": Reach(
        "the order of scores, advantages and update", "(self, metrics, timing_raw, sample_batch_size)", "d549e198"
    ),
    "verl.trainer.ppo.v1.PPOTrainer._compute_advantage": Reach(
        "overridden: our hook before the split", "(self, batch, metrics)", "7d2ef671"
    ),
    "verl.trainer.ppo.v1.PPOTrainer._compute_old_log_prob": Reach(
        "the trainer's own log-probs, and the entropy beside them", "(self, batch, metrics)", "706c0fdf"
    ),
    "verl.trainer.ppo.v1.PPOTrainer._compute_ref_log_prob": Reach(
        "the reference of ExOPD", "(self, batch, metrics)", "b96f872b"
    ),
    "verl.trainer.ppo.v1.PPOTrainer._update_actor": Reach("what the workers are given", "(self, batch, metrics)", "2619d15f"),
    "verl.trainer.ppo.v1.PPOTrainer._save_checkpoint": Reach("the files that convert.py reads", "(self)", "93327068"),
    "verl.trainer.ppo.v1.PPOTrainer._load_checkpoint": Reach("what a resumed run starts from", "(self)", "4f6c4d84"),
    "verl.trainer.ppo.v1.PPOTrainer.get_reward_handles": Reach("watched while rollouts are sampled", "(self)"),
    "verl.trainer.ppo.v1.PPOTrainer._write_generations": Reach(
        "the answers that our checkers judge",
        "(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path, global_steps)",
        "18cd8560",
    ),
    "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._wait_for_next_poll": Reach(
        "wrapped by the watch", "(self, partition_id, last_debug_time)", "86102bf1"
    ),
    "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.sample": Reach(
        "wrapped by the watch", "(self, global_steps, partition_id, batch_size)", "f6b71ef3"
    ),
    "verl.trainer.ppo.utils.need_critic": Reach("called by our main program", "(config)"),
    "verl.trainer.ppo.utils.need_reference_policy": Reach("called by our main program", "(config)"),
    "verl.utils.config.omega_conf_to_dataclass": Reach("builds our LossConfig", "(config, dataclass_type=None)"),
    "verl.utils.config.validate_config": Reach("called by our main program", "(config, use_reference_policy, use_critic)"),
    "verl.utils.device.auto_set_device": Reach("called by our main program", "(config)"),
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": Reach(
        "the base of our agent loop", "(AgentLoopBase)"
    ),
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop.run": Reach(
        "overridden: max_tokens of a horizon", "async (self, sampling_params, priority=0, **kwargs)", "bfc2023e"
    ),
    "verl.utils.tracking.FileLogger": Reach("writes the metrics that we read", "()", "438c6579"),
    "verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPCheckpointManager.save_checkpoint": Reach(
        "a rank's files of a checkpoint", "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)", "b0a867d0"
    ),
    "verl.utils.dataset.rl_dataset.RLHFDataset": Reach("reads our file of prompts", "(Dataset)", "8352abe4"),
}
"""By the name under which it is imported, or where it is defined."""


def _below(table: str, names: str) -> list[str]:
    return [f"{table}.{name}" for name in names.split()]


SETTINGS: tuple[str, ...] = (
    *_below(
        "actor_rollout_ref.actor",
        "checkpoint.load_contents checkpoint.save_contents data_loader_seed entropy_coeff entropy_from_logits_with_chunking "
        "fsdp_config.model_dtype fsdp_config.optimizer_offload fsdp_config.param_offload fsdp_config.seed grad_clip "
        "kl_loss_coef loss_agg_mode optim.betas optim.clip_grad optim.lr optim.lr_scheduler_type optim.lr_warmup_steps "
        "optim.optimizer optim.override_optimizer_config optim.weight_decay ppo_epochs ppo_max_token_len_per_gpu "
        "ppo_mini_batch_size shuffle strategy ulysses_sequence_parallel_size use_dynamic_bsz use_kl_loss",
    ),
    *_below(
        "actor_rollout_ref.model",
        "enable_gradient_checkpointing lora.merge lora_alpha lora_rank path target_modules tokenizer_path trust_remote_code "
        "use_remove_padding",
    ),
    *_below("actor_rollout_ref.ref.fsdp_config", "model_dtype param_offload seed"),
    *_below(
        "actor_rollout_ref.rollout",
        "agent.agent_loop_config_path agent.default_agent_loop calculate_log_probs do_sample dtype enforce_eager "
        "free_cache_engine gpu_memory_utilization ignore_eos load_format max_model_len n name seed temperature "
        "tensor_model_parallel_size top_k top_p val_kwargs.do_sample val_kwargs.n val_kwargs.temperature "
        "val_kwargs.top_k val_kwargs.top_p",
    ),
    *_below("algorithm", "adv_estimator use_kl_in_reward"),
    *_below(
        "algorithm.rollout_correction",
        "bypass_mode rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs",
    ),
    *_below("critic", "enable"),
    *_below(
        "data",
        "dataloader_num_workers filter_overlong_prompts filter_overlong_prompts_workers max_prompt_length max_response_length "
        "prompt_key seed shuffle train_batch_size train_files truncation trust_remote_code val_files",
    ),
    *_below("distillation", "enabled n_gpus_per_node nnodes teacher_key"),
    *_below(
        "distillation.distillation_loss",
        "_target_ clip_ratio clip_ratio_high clip_ratio_low log_prob_min_clamp loss_max_clamp loss_mode policy_loss_mode topk "
        "use_policy_gradient use_task_rewards",
    ),
    *_below(
        "distillation.teacher_models.teacher_model",
        "inference.dtype inference.gpu_memory_utilization inference.max_model_len inference.name inference.prompt_length "
        "inference.response_length inference.temperature inference.tensor_model_parallel_size model_path",
    ),
    *_below("reward.custom_reward_function", "name path"),
    *_below(
        "trainer",
        "default_local_dir experiment_name logger max_actor_ckpt_to_keep n_gpus_per_node nnodes project_name resume_from_path "
        "resume_mode save_freq test_freq total_epochs total_training_steps use_v1 v1.trainer_mode val_before_train "
        "validation_data_dir",
    ),
)
"""Settings of verl's tree that the launcher sets: without them Hydra refuses the command."""

ADDED: tuple[str, ...] = (
    *_below("actor_rollout_ref", "actor.fsdp_config.mixed_precision ref.fsdp_config.mixed_precision"),
    *_below("actor_rollout_ref.actor.checkpoint", "save_lora_only"),
    *_below("actor_rollout_ref.model.override_config", "attn_implementation"),
    *_below("distillation.distillation_loss", "clip_ratio_c iwopd use_chunked_topk"),
    *_below("reward.custom_reward_function", "reward_kwargs"),
)
"""Settings that the launcher adds with `+`: verl's classes read them, but its tree of settings does not have them."""

_HANDLES = "pinged while rollouts are sampled (watch.py)"
_METRIC = "a metric that we read (metrics.py)"
_TIMER = "a timer of a stage (metrics.py)"
_FILE = "a file of a checkpoint (convert.py)"
_COLUMN = "a column of the batch (losses.py, hook.py)"
TEXTS: Mapping[str, Mapping[str, str]] = {
    "__init__.py": {'group="verl.plugins"': "loads our plugin", "VERL_USE_EXTERNAL_PLUGINS": "named by an error of ours"},
    "utils/tracking.py": {"VERL_FILE_LOGGER_PATH": "where the metrics are written"},
    "trainer/distillation/losses.py": {
        '"distillation/loss"': _METRIC,
        "distillation/{k[len('actor/') :]}": _METRIC,
        'data["old_log_probs"]': _COLUMN,
        'data["response_mask"]': _COLUMN,
        'data["teacher_logprobs"]': _COLUMN,
        'data.get("rollout_is_weights"': _COLUMN,
        'model_output["distillation_losses"]': "the sum over ids of the forward KL",
        'model_output["student_mass"]': "the student's mass on the ids",
        'model_output["teacher_mass"]': "the teacher's mass on the ids",
    },
    "trainer/ppo/core_algos.py": {
        '"actor/pg_clipfrac"': _METRIC,
        '"actor/pg_clipfrac_lower"': _METRIC,
        'config.get("clip_ratio_c"': "the dual clip, which our LossConfig adds",
    },
    "trainer/ppo/metric_utils.py": {
        '"response_length/mean"': _METRIC,
        '"response_length/max"': _METRIC,
        '"response_length/clip_ratio"': _METRIC,
        'f"timing_s/{name}"': _METRIC,
    },
    "trainer/ppo/rollout_corr_helper.py": {
        '"rollout_is_mean"': _METRIC,
        '"rollout_is_max"': _METRIC,
        '"rollout_is_min"': _METRIC,
        '"rollout_is_ratio_fraction_high"': _METRIC,
        "rollout_corr/": _METRIC,
    },
    "trainer/ppo/v1/replay_buffer.py": {"no materializable trajectories": "all rollouts of a step failed (watch.py)"},
    "trainer/ppo/v1/trainer_base.py": {
        'tag["min_global_steps"]': "the version of the weights that answered (sync.py)",
        '"reward_extra_info"': "where verdicts travel (reward.py)",
        'marked_timer("step"': _TIMER,
        'marked_timer("gen"': _TIMER,
        'marked_timer("old_log_prob"': _TIMER,
        'marked_timer("ref"': _TIMER,
        'marked_timer("adv"': _TIMER,
        'marked_timer("update_actor"': _TIMER,
        'marked_timer("save_checkpoint"': _TIMER,
        '"actor/entropy"': _METRIC,
        '"entropy"': _COLUMN,
        '"ref_log_prob"': _COLUMN,
        '"rollout_log_probs"': _COLUMN,
        "self.replay_buffer": "wrapped by the watch",
        "self.global_steps": "the progress of training (trainer.py)",
        "self.total_training_steps": "the progress of training (trainer.py)",
        "self.agent_loop_manager = agent_loop_manager": _HANDLES,
        "self.llm_server_manager": _HANDLES,
        "self.teacher_model_manager": _HANDLES,
        "global_step_": _FILE,
        "latest_checkpointed_iteration.txt": _FILE,
        '"data.pt"': _FILE,
    },
    "trainer/ppo/v1/trainer_sync.py": {'marked_timer("update_weights"': _TIMER, '@register_trainer("sync")': "its mode"},
    "experimental/agent_loop/agent_loop.py": {
        "self.agent_loop_workers": _HANDLES,
        "agent_loop_config_path": "names our agent loop",
        "default_agent_loop": "chooses our agent loop",
    },
    "workers/rollout/llm_server.py": {"self.server_handles": _HANDLES},
    "experimental/teacher_loop/teacher_model.py": {"self.server_handles": _HANDLES},
    "utils/checkpoint/fsdp_checkpoint_manager.py": {
        "model_world_size_{self.world_size}_rank_{self.rank}.pt": _FILE,
        "optim_world_size_{self.world_size}_rank_{self.rank}.pt": _FILE,
        "extra_state_world_size_{self.world_size}_rank_{self.rank}.pt": _FILE,
        '"fsdp_config.json"': _FILE,
        '"huggingface"': _FILE,
    },
    "workers/engine_workers.py": {'"grad_norm"': _METRIC, '"perf/max_memory_allocated_gb"': _METRIC},
    "model_merger/base_model_merger.py": {
        '"merge"': "makes plain weights of shards (convert.py)",
        '"--backend"': "an option of the merger",
        '"--local_dir"': "an option of the merger",
        '"--target_dir"': "an option of the merger",
    },
}
"""Fragments of verl's files that we rely on, and why: metrics, timers, columns, files, attributes."""
