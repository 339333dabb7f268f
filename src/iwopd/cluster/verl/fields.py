"""What becomes of every setting on verl. Nothing is dropped in silence: a setting that is missing here fails a test.

`mapped`    it becomes a setting of verl, named here
`data`      it decides which prompts are written into the files that verl reads
`launcher`  our own launcher follows it
`unused`    it means nothing there, for the reason given; a value other than the default changes nothing
`only`      verl can do some values and no others: those are refused, with the reason and the remedy
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from iwopd.algo.objectives import Divergence
from iwopd.cluster.verl.carrying import CARRIED, LIMITS
from iwopd.config import Config, MixSettings
from iwopd.config.engines import AUTO, STUDENT
from iwopd.rollout.settings import ServerSettings
from iwopd.train.chats import eval_rendering, student_rendering

Kind = Literal["mapped", "data", "launcher", "unused", "only"]


@dataclass(frozen=True)
class Treatment:
    kind: Kind
    text: str
    """The verl setting, the reason, or (for `only`) why other values are refused and the remedy."""
    allowed: Callable[[Any, Config], bool] | None = None
    """For `only`: whether verl can do a value, beside the other settings."""


def _mapped(text: str) -> Treatment:
    return Treatment("mapped", text)


def _unused(text: str) -> Treatment:
    return Treatment("unused", text)


def _only(allowed: Any, text: str) -> Treatment:
    return Treatment("only", text, allowed if callable(allowed) else lambda value, config: value == allowed)


def _not_of_a_divergence(value: Any, config: Config) -> bool:
    return config.method.objective != Divergence.name


_LOSS = "distillation.distillation_loss"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_TEACHER = "distillation.teacher_models.*"
_FILTERED = "log-probs of student and teacher are over the whole vocabulary"
_GGUF = "verl reads safetensors only: convert the model to a Hugging Face folder and name that"
_REVISION = "verl loads no revisions: download it (hf download ID --revision REV --local-dir DIR) and name the folder"
_SERVER = "verl starts the teacher's servers itself, on cluster.teacher_gpus: leave it out"
_SERVER_SETTING = "of teacher servers elsewhere; verl starts its own"
_ROLLOUT_SERVER = "of a rollout server elsewhere; verl starts its own"
_JUDGE = "reward.custom_reward_function.reward_kwargs"
_ALONE = "when it trains on the teacher alone: set it to 0, or use the local engine"

_MIX = "verl trains on what the student itself wrote: leave [rollout.mix] out, or use the local engine"
PROMPT_OF_ITS_OWN: dict[str, Any] = {"system": None, "user": None, "chat_template": None, "chat_template_kwargs": {}}
"""Settings that make a teacher see another prompt than the student, and their values that do not."""

FIELDS: dict[str, Treatment] = {
    "seed": _mapped(f"data.seed, {_ROLLOUT}.seed, {_ACTOR}.data_loader_seed, fsdp_config.seed; the order of the prompts"),
    "steps": _mapped("trainer.total_training_steps"),
    "threads": _unused("of one process on this machine; verl's workers choose their own"),
    "rank_timeout": _unused("verl's own processes wait for each other"),
    "precision": _mapped(f"{_ACTOR}.fsdp_config.mixed_precision, {_ROLLOUT}.dtype"),
    "head_precision": _unused("of this trainer's output head; verl has its own, in the precision of its model"),
    # --- models -----------------------------------------------------------------------------------------------------
    "models.world": _mapped(f"actor_rollout_ref.model.path, {_TEACHER}.model_path: the embedded world's folders"),
    "models.student_size": _mapped("actor_rollout_ref.model.path"),
    "models.teacher_size": _mapped(f"{_TEACHER}.model_path"),
    "models.teacher_tokenizer": _only(
        lambda name, config: name in (None, "characters"),
        "verl's teacher reads the student's ids: leave it out, or train with the local engine",
    ),
    "models.lineage": _mapped(f"actor_rollout_ref.model.path, {_TEACHER}.model_path"),
    "models.student": _mapped("actor_rollout_ref.model.path"),
    "models.teacher": _mapped(f"{_TEACHER}.model_path"),
    "models.reference": _only(None, "verl's reference is the student before training: leave it out"),
    **{f"models.{role}_gguf_file": _only(None, _GGUF) for role in ("student", "teacher", "reference")},
    **{f"models.{role}_revision": _only(None, _REVISION) for role in ("student", "teacher", "reference")},
    "models.dtype": _mapped(
        f"{_ACTOR}.fsdp_config.mixed_precision, ref.fsdp_config.model_dtype, {_ROLLOUT}.dtype; trained weights stay in float32"
    ),
    "models.teacher_dtype": _mapped(f"{_TEACHER}.inference.dtype"),
    "models.attention": _mapped("actor_rollout_ref.model.override_config.attn_implementation, use_remove_padding"),
    "models.teacher_device": _only(None, "the teacher has GPUs of its own on verl: set cluster.teacher_gpus instead"),
    "models.teacher_offload": _unused("the teacher has GPUs of its own on verl"),
    "models.teacher_quantize": _only(
        "none", "verl's teacher is an engine of its own: set it to 'none', or use the local engine"
    ),
    "models.trust_remote_code": _mapped("actor_rollout_ref.model.trust_remote_code, data.trust_remote_code"),
    "lora.rank": Treatment(
        "mapped",
        f"actor_rollout_ref.model.lora_rank, {_ROLLOUT}.load_format, {_ACTOR}.checkpoint.save_lora_only; vLLM takes up to 512",
        lambda rank, config: rank <= 512 or config.cluster.backend != "vllm",
    ),
    "lora.alpha": Treatment(
        "mapped",
        "actor_rollout_ref.model.lora_alpha, which is a whole number",
        lambda alpha, config: float(alpha).is_integer() or not config.lora.rank,
    ),
    "lora.targets": _mapped("actor_rollout_ref.model.target_modules"),
    "lora.quantize": _only("none", "verl shards the frozen weights as they are: set it to 'none', or use the local engine"),
    # --- data -------------------------------------------------------------------------------------------------------
    "data.prompts": Treatment("data", "verl/train.parquet in the run directory"),
    "data.sets": Treatment("data", "verl/train.parquet in the run directory"),
    "data.train_size": Treatment("data", "verl/train.parquet in the run directory"),
    "data.max_prompt_tokens": _mapped("data.max_prompt_length"),
    "data.chat_template": _mapped("actor_rollout_ref.model.tokenizer_path: the student's tokenizer with it, in verl/tokenizer"),
    "data.chat_template_kwargs": _mapped("data.apply_chat_template_kwargs"),
    "data.prefill": _only("", "verl's prompts end where the chat template ends: put it into the tokenizer's template"),
    # --- method: see params.py ----------------------------------------------------------------------------------------
    "method.objective": _only(
        lambda name, config: name in CARRIED, f"verl carries {' and '.join(CARRIED)}: choose one, or use the local engine"
    ),
    "method.advantage": _mapped(f"{_LOSS}.loss_mode, {_LOSS}.iwopd.advantage, {_ACTOR}.use_kl_loss"),
    "method.weights": _mapped(f"{_LOSS}.loss_mode, {_LOSS}.iwopd.weights"),
    "method.params": _mapped(f"{_LOSS}.iwopd.params"),
    **{
        f"method.{name}": _mapped(f"{_LOSS}.iwopd.{name}")
        for name in ("scale", "weighting", "power", "low", "high", "future")  # of advantages
    },
    "method.clip": _mapped(f"{_LOSS}.clip_ratio, clip_ratio_low, clip_ratio_high"),
    "method.dual_clip": _mapped(f"{_LOSS}.clip_ratio_c"),
    "method.correction_threshold": _mapped("algorithm.rollout_correction.rollout_is_threshold"),
    "method.entropy_coef": _only(0, f"verl drops entropy {_ALONE}"),
    "method.kl_coef": _only(0, f"verl drops the KL {_ALONE}"),
    **{f"method.{name}": _only(*limit) for name, limit in LIMITS.items()},
    "method.k": _mapped(f"{_LOSS}.topk; the teacher's prompt_logprobs"),
    "method.beta": _only(_not_of_a_divergence, "of 'jsd', which verl does not carry"),
    "method.alpha": _only(_not_of_a_divergence, f"of skewed KLs, which verl does not carry; of 'log-mix' {_LOSS}.iwopd.alpha"),
    "reward.checker": Treatment(
        "mapped",
        f"reward.custom_reward_function, {_JUDGE}.checker, {_LOSS}.iwopd.reward; with whole answers: verl does not say which "
        "ones a horizon ended, so leave [rollout.horizon] out, or use the local engine",
        lambda checker, config: checker is None or config.rollout.horizon.type == "full",
    ),
    "reward.coefficient": _mapped(f"{_LOSS}.iwopd.reward.coefficient"),
    "reward.normalize": _mapped(f"{_LOSS}.iwopd.reward.normalize"),
    "reward.timeout": _mapped(f"{_JUDGE}.timeout"),
    "reward.workers": _mapped(f"{_JUDGE}.workers: of each of verl's reward workers (reward.num_workers)"),
    # --- rollouts ---------------------------------------------------------------------------------------------------
    "rollout.engine": _only(
        lambda engine, config: engine in ("local", "vllm"),
        "verl's own servers write (cluster.backend): set it to 'vllm', or leave it out",
    ),
    "rollout.prompts_per_step": _mapped("data.train_batch_size"),
    "rollout.samples": _mapped(f"{_ROLLOUT}.n"),
    "rollout.max_tokens": _mapped("data.max_response_length"),
    "rollout.horizon.type": _only(
        lambda name, config: (
            not config.rollout.horizon.made.stops_online and config.rollout.horizon.made.tokens_per_step is None
        ),
        "verl's teacher sees answers when they are whole: choose 'full', 'fixed' or 'growing', or train with the local engine",
    ),
    **{
        f"rollout.horizon.{name}": Treatment("data", f"verl/train.parquet (extra_info.limit), which {_ROLLOUT}.agent follows")
        for name in ("tokens", "from", "to", "schedule", "until")
    },
    "rollout.mix.share": _only(0, _MIX),
    "rollout.mix.afterwards": _only(0, _MIX),
    **{
        f"rollout.mix.{name}": _unused("of answers that others wrote, which verl does not train on")
        for name in MixSettings.model_fields
        if name not in ("share", "afterwards")
    },
    "rollout.temperature": _only(1, "verl's teacher scores at temperature 1, and log-probs of two temperatures make no gap"),
    "rollout.top_p": _only(1, f"{_FILTERED}: sample from all of it with 1"),
    "rollout.top_k": _only(0, f"{_FILTERED}: sample from all of it with 0"),
    "rollout.stop_tokens": _only([], "verl stops where generation_config.json says: add the ids to its eos_token_id"),
    "rollout.truncated": _only("keep", "verl trains on answers that were cut off: set it to 'keep', or use the local engine"),
    "rollout.thinking": _only("keep", "verl trains on whole answers: set it to 'keep', or use the local engine"),
    "rollout.mismatch_limit": _mapped(f"{_LOSS}.iwopd.mismatch_limit"),
    "rollout.overlap": _unused("verl's teacher scores every answer as soon as it is written"),
    "engine.vllm.dtype": _mapped(f"{_ROLLOUT}.dtype"),
    "engine.vllm.max_model_len": _mapped(f"{_ROLLOUT}.max_model_len"),
    "engine.vllm.memory_share": _mapped(f"{_ROLLOUT}.gpu_memory_utilization"),
    "engine.vllm.cache_gb": _only(None, "verl has no such setting: leave it out and set engine.vllm.memory_share"),
    "engine.vllm.tensor_parallel": _mapped(f"{_ROLLOUT}.tensor_model_parallel_size"),
    "engine.vllm.eager": _mapped(f"{_ROLLOUT}.enforce_eager"),
    "engine.vllm.sleep": _unused("the student's engine always gives its memory back for the update (free_cache_engine)"),
    **{f"engine.server.{name}": _unused(_ROLLOUT_SERVER) for name in ServerSettings.model_fields},
    # --- update -----------------------------------------------------------------------------------------------------
    "optim.lr": _mapped(f"{_ACTOR}.optim.lr"),
    "optim.betas": _mapped(f"{_ACTOR}.optim.betas"),
    "optim.eps": _mapped(f"{_ACTOR}.optim.override_optimizer_config.eps"),
    "optim.weight_decay": _mapped(f"{_ACTOR}.optim.weight_decay"),
    "optim.grad_clip": _mapped(f"{_ACTOR}.optim.clip_grad, {_ACTOR}.grad_clip"),
    "optim.ppo_epochs": _mapped(f"{_ACTOR}.ppo_epochs"),
    "optim.mini_batches": _mapped(f"{_ACTOR}.ppo_mini_batch_size (prompts_per_step / mini_batches)"),
    "optim.token_budget": _mapped(f"{_ACTOR}.ppo_max_token_len_per_gpu, at least one whole rollout"),
    "optim.gradient_checkpointing": _mapped("actor_rollout_ref.model.enable_gradient_checkpointing"),
    "optim.shard": _unused("verl always shards: weights, gradients and moments"),
    # --- evaluation, checkpoints, tracking ----------------------------------------------------------------------------
    "eval.every": _mapped("trainer.test_freq"),
    "eval.tasks": _mapped("trainer.test_freq, val_before_train; verl/val.parquet in the run directory"),
    "eval.data": Treatment("data", "verl/val.parquet in the run directory"),
    "eval.prompts": _mapped("trainer.test_freq, val_before_train; verl/val.parquet in the run directory"),
    "eval.samples": _mapped(f"{_ROLLOUT}.val_kwargs.n"),
    "eval.chat_template_kwargs": _only(
        lambda given, config: eval_rendering(config) == student_rendering(config),
        "verl renders all prompts alike, by data.chat_template_kwargs: leave it out, and use `iwopd eval --model RUN`",
    ),
    "eval.temperature": _mapped(f"{_ROLLOUT}.val_kwargs.temperature, do_sample"),
    "eval.max_tokens": _only(
        lambda limit, config: limit in (None, config.rollout.max_tokens),
        "verl has one limit for answers, rollout.max_tokens: leave it out, and evaluate with `iwopd eval --model RUN`",
    ),
    "eval.kept_rollouts": _unused("verl keeps the answers as texts, in verl/validation-NNN, without log-probs"),
    "checkpoint.every": _mapped("trainer.save_freq"),
    "checkpoint.keep": _mapped("trainer.max_actor_ckpt_to_keep"),
    "checkpoint.best": _only(None, "verl saves every checkpoint.every steps, not when a score is the best: leave it out"),
    "tracking.console": Treatment("launcher", "how progress is shown"),
    "tracking.trackers": Treatment("launcher", "they get our names of verl's metrics"),
    "tracking.project": _mapped("trainer.project_name"),
    # --- teachers ---------------------------------------------------------------------------------------------------
    "teacher.source": _only(
        "model", "verl's teacher is a model of its own: name one (models.teacher), or use the local engine"
    ),
    "reference.source": _only("model", "verl's reference is the student before training: leave it out"),
    "ema.decay": _unused("of the student's moving average, which verl does not keep"),
    "ema.device": _unused("of the student's moving average, which verl does not keep"),
    "teacher.urls": _only([], _SERVER),
    "teacher.name": _only(None, _SERVER),
    "teacher.dialect": _only("vllm", _SERVER),
    "teacher.api_key_env": _only(None, _SERVER),
    "teacher.max_in_flight": _unused(_SERVER_SETTING),
    "teacher.tokens_per_request": _unused(_SERVER_SETTING),
    "teacher.request_timeout": _unused(_SERVER_SETTING),
    "teacher.patience": _unused(_SERVER_SETTING),
    "teacher.deadline": _unused(_SERVER_SETTING),
    "teacher.tokenizer": _only(
        lambda value, config: value in (AUTO, STUDENT),
        "verl's teacher gets the student's ids: leave it out, or use the local engine for a teacher with another tokenizer",
    ),
    **{
        f"teacher.{name}": _only(value, "verl's teacher sees the student's prompt: leave it out, or use the local engine")
        for name, value in PROMPT_OF_ITS_OWN.items()
    },
    "teacher.cache": _unused("verl's teacher scores every answer anew"),
    "teacher.cache_gb": _unused("verl's teacher scores every answer anew"),
    "teacher.others": _mapped(
        f"{_TEACHER}, distillation.teacher_key; each with a model, without urls, and without a prompt of its own"
    ),
    # --- cluster ----------------------------------------------------------------------------------------------------
    "cluster.nodes": _mapped("trainer.nnodes, distillation.nnodes"),
    "cluster.gpus_per_node": _mapped("trainer.n_gpus_per_node, distillation.n_gpus_per_node"),
    "cluster.teacher_gpus": _mapped("distillation.nnodes, n_gpus_per_node; the rest is trainer.nnodes, n_gpus_per_node"),
    "cluster.teacher_tensor_parallel": _mapped(f"{_TEACHER}.inference.tensor_model_parallel_size"),
    "cluster.teacher_memory_share": _mapped(f"{_TEACHER}.inference.gpu_memory_utilization"),
    "cluster.backend": _mapped(f"{_ROLLOUT}.name, {_TEACHER}.inference.name"),
    "cluster.strategy": _mapped(f"{_ACTOR}.strategy"),
    "cluster.sequence_parallel": _mapped(f"{_ACTOR}.ulysses_sequence_parallel_size"),
    "cluster.offload": _mapped(f"{_ACTOR}.fsdp_config.param_offload, optimizer_offload; ref.fsdp_config.param_offload"),
    "cluster.save_hf": _mapped(f"{_ACTOR}.checkpoint.save_contents"),
    "cluster.checkpoints": _mapped("trainer.default_local_dir"),
    "cluster.patience": Treatment("launcher", "when a job without progress is ended"),
    "cluster.overrides": _mapped("as they stand, last"),
}

TITLES: dict[Kind, str] = {
    "mapped": "becomes",
    "data": "goes into",
    "launcher": "the launcher:",
    "unused": "means nothing there:",
    "only": "other values are refused:",
}


def table() -> str:
    """The same for the documentation."""
    rows = [f"| `{name}` | {TITLES[found.kind]} | {found.text} |" for name, found in FIELDS.items()]
    return "\n".join(["| setting | | |", "| --- | --- | --- |", *rows])
