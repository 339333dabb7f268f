"""Our settings as verl's: a list of Hydra overrides. Needs neither verl nor the models.

What becomes of each of our settings stands in `fields.py`, what the method decides in `params.py`. Defaults of verl that would
change the method or the data are set here even where the recipe says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iwopd.cluster.verl import params
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import literal
from iwopd.cluster.verl.pools import Pools, pools
from iwopd.config import Config
from iwopd.train.chats import student_rendering
from iwopd.train.loading import planned_world
from iwopd.train.mismatch import mismatch_limit
from iwopd.train.scoring import training_progress

Pairs = Iterator[tuple[str, Any]]
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TEACHERS = "distillation.teacher_models"
AGENT_LOOP = "iwopd_limited"
"""verl's name of our agent loop (`agent_loop.py`)."""
FILTER_WORKERS_ABOVE = 20_000
"""Prompts from which on verl checks their lengths in several processes."""


@dataclass(frozen=True)
class Places:
    """Files of a run, as absolute paths that every machine must see."""

    run: Path
    checkpoints: Path
    metrics: Path
    """What verl's file logger writes: one file per launch, as it starts each with an empty one."""
    validation: Path
    """Where verl leaves the answers of evaluations: one folder per launch."""

    @property
    def folder(self) -> Path:
        return self.run / "verl"

    @property
    def train_file(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def tokenizer(self) -> Path:
        """The student's, with the chat template of the recipe, where it has one."""
        return self.folder / "tokenizer"

    @property
    def agent_loops(self) -> Path:
        """What tells verl of our agent loop, where a horizon needs it."""
        return self.folder / "agent_loops.yaml"

    @property
    def val_file(self) -> Path:
        """Problems of the evaluated tasks; one row if there are none, as verl opens it all the same."""
        return self.folder / "val.parquet"


def places(config: Config, run: Path, launch: int = 1) -> Places:
    run = run.absolute()
    own = run / "verl"
    checkpoints = Path(config.cluster.checkpoints).absolute() if config.cluster.checkpoints else own / "checkpoints"
    return Places(run, checkpoints, own / f"metrics-{launch:03d}.jsonl", own / f"validation-{launch:03d}")


def translate(config: Config, where: Places, resume: Path | None = None, *, evaluate_first: bool = False) -> list[str]:
    """All overrides. `resume` is the folder of the checkpoint (`…/global_step_N`) to go on from.

    `evaluate_first`: evaluate that checkpoint before training, as the untrained student always is.
    """
    shared = pools(config)
    pairs = [
        *_data(config, where),
        *_models(config, where),
        *_update(config),
        *_rollout(config, where),
        *_teachers(config, shared),
        *_trainer(config, where, shared, resume, evaluate_first=evaluate_first),
    ]
    ours = [f"{name}={literal(value)}" for name, value in pairs]
    limit = mismatch_limit(config, rollout_dtype(config))
    reward = config.reward if config.reward.checker is not None else None
    method = params.overrides(config.method, config.steps, reward=reward, mismatch_limit=limit)
    return [*ours, *method, *config.cluster.overrides]


def rollout_dtype(config: Config) -> str:
    """Precision of the rollout servers."""
    return config.engine.vllm.dtype or config.compute_dtype


def environment_overrides(variables: Mapping[str, str]) -> list[str]:
    """Environment variables as overrides: Ray hands them to workers on other machines."""
    return [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={literal(value)}" for name, value in variables.items()]


def response_tokens(config: Config) -> int:
    """Longest response."""
    world = planned_world(config)
    limit = config.rollout.max_tokens or (world.max_response_tokens if world is not None else None)
    if limit is None:
        raise VerlError("rollout.max_tokens is needed when no embedded world says how long answers are")
    return limit


def is_limited(config: Config) -> bool:
    """Whether a horizon ends answers before the longest."""
    return config.rollout.horizon.type != "full"


def answer_limit(config: Config, step: int) -> int:
    """Most tokens of an answer of this step, which counts from 1."""
    return config.rollout.horizon.made.limit(response_tokens(config), training_progress(step, config.steps))


def evaluates(config: Config) -> bool:
    """Whether anything is evaluated while it trains."""
    return config.eval.prompts > 0 and bool(config.eval.tasks or config.models.world)


def prompt_tokens(config: Config) -> int:
    """Longest prompt: of an embedded world as long as its prompts are, whose models have little room."""
    world = planned_world(config)
    return config.data.max_prompt_tokens if world is None else min(config.data.max_prompt_tokens, world.max_prompt_tokens)


def model_path(config: Config, name: str) -> str:
    """Folder or hub id of `student` or `teacher`; of an embedded world where its models are or will be."""
    world = planned_world(config)
    if world is not None:
        return str(getattr(world, name).absolute())
    return _everywhere(getattr(config.models, name))


def model_paths(config: Config) -> list[str]:
    """Folders or hub ids of all models that verl's workers load."""
    others = [_everywhere(str(other.model)) for other in config.teacher.others.values()]
    return [model_path(config, "student"), model_path(config, "teacher"), *others]


def _everywhere(path: str) -> str:
    """A path that holds in other working directories, too; a hub id stays as it is."""
    local = Path(path).expanduser()
    return str(local.absolute()) if local.exists() or path.startswith(("/", ".", "~")) else path


def _data(config: Config, where: Places) -> Pairs:
    rows = config.steps * config.rollout.prompts_per_step
    yield "data.train_files", str(where.train_file)
    yield "data.val_files", str(where.val_file)
    yield "data.prompt_key", "prompt"
    yield "data.train_batch_size", config.rollout.prompts_per_step
    yield "data.max_prompt_length", prompt_tokens(config)
    yield "data.max_response_length", response_tokens(config)
    yield "data.shuffle", False  # the file has the prompts in the order of the steps
    yield "data.seed", config.seed
    yield "data.dataloader_num_workers", 0
    yield "data.filter_overlong_prompts", True  # there are none: they were left out, and counted, when the file was written
    yield "data.filter_overlong_prompts_workers", 8 if rows > FILTER_WORKERS_ABOVE else None
    yield "data.truncation", "error"
    yield "data.trust_remote_code", config.models.trust_remote_code
    for name, value in student_rendering(config).kwargs.items():
        yield f"+data.apply_chat_template_kwargs.{name}", value
    yield "reward.custom_reward_function.path", "pkg://iwopd.cluster.verl.reward"
    reward = config.reward
    yield "reward.custom_reward_function.name", "no_reward" if reward.checker is None else "judge"
    if reward.checker is not None:
        given = {"checker": reward.checker, "timeout": reward.timeout, "workers": reward.workers}
        yield "+reward.custom_reward_function.reward_kwargs", given


def _models(config: Config, where: Places) -> Pairs:
    models = config.models
    yield f"{MODEL}.path", model_path(config, "student")
    yield f"{MODEL}.trust_remote_code", models.trust_remote_code
    yield f"{MODEL}.enable_gradient_checkpointing", config.optim.gradient_checkpointing
    if models.attention is not None:
        yield f"+{MODEL}.override_config.attn_implementation", models.attention
    if config.data.chat_template is not None:
        yield f"{MODEL}.tokenizer_path", str(where.tokenizer)
    if lora := config.lora.rank:
        yield f"{MODEL}.lora_rank", lora
        yield f"{MODEL}.lora_alpha", int(config.lora.alpha)
        targets = config.lora.targets
        yield f"{MODEL}.target_modules", targets[0] if targets == ["all-linear"] else targets
        yield f"{MODEL}.lora.merge", False  # verl would round the sum of weights and adapter to bfloat16
        yield f"{ROLLOUT}.load_format", "safetensors"  # the engine reads the frozen weights itself, and gets the adapter
        yield f"+{ACTOR}.checkpoint.save_lora_only", True
    yield f"{MODEL}.use_remove_padding", models.attention not in ("eager", "sdpa")  # packed rows need flash attention


def _update(config: Config) -> Pairs:
    optim, cluster = config.optim, config.cluster
    longest = prompt_tokens(config) + response_tokens(config)
    computed = "bf16" if config.precision == "bf16" else PRECISIONS[config.models.dtype]
    yield f"{ACTOR}.strategy", cluster.strategy
    yield f"{ACTOR}.ulysses_sequence_parallel_size", cluster.sequence_parallel
    yield f"{ACTOR}.ppo_epochs", optim.ppo_epochs
    yield f"{ACTOR}.ppo_mini_batch_size", config.rollout.prompts_per_step // optim.mini_batches
    yield f"{ACTOR}.use_dynamic_bsz", True
    yield f"{ACTOR}.ppo_max_token_len_per_gpu", math.ceil(max(optim.token_budget, longest) / cluster.sequence_parallel)
    yield f"{ACTOR}.shuffle", False
    yield f"{ACTOR}.data_loader_seed", config.seed
    yield f"{ACTOR}.entropy_coeff", 0
    yield f"{ACTOR}.entropy_from_logits_with_chunking", True  # an entropy of the whole vocabulary is measured: in pieces
    yield f"{ACTOR}.grad_clip", optim.grad_clip
    yield f"{ACTOR}.optim.optimizer", "AdamW"
    yield f"{ACTOR}.optim.lr", optim.lr
    yield f"{ACTOR}.optim.lr_scheduler_type", "constant"
    yield f"{ACTOR}.optim.lr_warmup_steps", 0
    yield f"{ACTOR}.optim.betas", list(optim.betas)
    yield f"{ACTOR}.optim.weight_decay", optim.weight_decay
    yield f"{ACTOR}.optim.clip_grad", optim.grad_clip
    yield f"{ACTOR}.optim.override_optimizer_config", {"eps": optim.eps}
    # The actor's shards are its master weights: in float32, whatever precision they are gathered in.
    for role, stored in ((ACTOR, "fp32"), ("actor_rollout_ref.ref", PRECISIONS[config.models.dtype])):
        precision = {"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        yield f"{role}.fsdp_config.model_dtype", stored
        yield f"+{role}.fsdp_config.mixed_precision", precision
        yield f"{role}.fsdp_config.seed", config.seed
        yield f"{role}.fsdp_config.param_offload", cluster.offload
    yield f"{ACTOR}.fsdp_config.optimizer_offload", cluster.offload
    whole = cluster.save_hf and not config.lora.rank  # of an adapter verl would write a file that nobody can load
    yield f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", *(["hf_model"] if whole else [])]
    yield f"{ACTOR}.checkpoint.load_contents", ["model", "optimizer", "extra"]
    yield "algorithm.adv_estimator", "grpo"  # of rewards, which are all 0; the default would train a critic
    yield "algorithm.use_kl_in_reward", False
    yield "critic.enable", False


def _rollout(config: Config, where: Places) -> Pairs:
    vllm, cluster = config.engine.vllm, config.cluster
    longest = prompt_tokens(config) + response_tokens(config)
    yield f"{ROLLOUT}.name", cluster.backend
    yield f"{ROLLOUT}.n", config.rollout.samples
    yield f"{ROLLOUT}.temperature", 1.0
    yield f"{ROLLOUT}.top_p", 1.0
    yield f"{ROLLOUT}.top_k", -1
    yield f"{ROLLOUT}.do_sample", True
    yield f"{ROLLOUT}.ignore_eos", False
    yield f"{ROLLOUT}.val_kwargs.n", config.eval.samples if config.eval.temperature else 1
    yield f"{ROLLOUT}.val_kwargs.temperature", config.eval.temperature
    yield f"{ROLLOUT}.val_kwargs.do_sample", config.eval.temperature > 0
    yield f"{ROLLOUT}.val_kwargs.top_p", 1.0
    yield f"{ROLLOUT}.val_kwargs.top_k", -1
    yield f"{ROLLOUT}.seed", config.seed
    yield f"{ROLLOUT}.dtype", rollout_dtype(config)
    yield f"{ROLLOUT}.max_model_len", vllm.max_model_len or longest
    yield f"{ROLLOUT}.gpu_memory_utilization", vllm.memory_share
    yield f"{ROLLOUT}.tensor_model_parallel_size", vllm.tensor_parallel
    yield f"{ROLLOUT}.enforce_eager", vllm.eager
    yield f"{ROLLOUT}.free_cache_engine", True
    if is_limited(config):
        yield f"{ROLLOUT}.agent.agent_loop_config_path", str(where.agent_loops)
        yield f"{ROLLOUT}.agent.default_agent_loop", AGENT_LOOP
    yield "algorithm.rollout_correction.bypass_mode", False  # old log-probs are the trainer's own
    yield "algorithm.rollout_correction.rollout_is_batch_normalize", False
    yield "algorithm.rollout_correction.rollout_rs", None


def _teachers(config: Config, shared: Pools) -> Pairs:
    yield "distillation.enabled", True
    yield "distillation.nnodes", shared.teacher.nodes
    yield "distillation.n_gpus_per_node", shared.teacher.gpus_per_node
    yield "distillation.teacher_key", "teacher"
    names = {DEFAULT_TEACHER: model_path(config, "teacher")}
    names |= {name: _everywhere(str(other.model)) for name, other in config.teacher.others.items()}
    inference = _inference(config)
    if len(names) == 1:
        yield f"{TEACHERS}.teacher_model.model_path", names[DEFAULT_TEACHER]
        for name, value in inference.items():
            yield f"{TEACHERS}.teacher_model.inference.{name}", value
        return
    for number, (name, path) in enumerate(names.items()):  # never `teacher_model`: verl drops that one beside others
        entry = {"key": name, "model_path": path, "num_replicas": shared.teacher_replicas}
        yield f"+{TEACHERS}.iwopd_{number}", {**entry, "inference": {**INFERENCE_DEFAULTS, **inference}}


DEFAULT_TEACHER = "default"
"""What the prompts' column `teacher` says where the recipe names none."""
INFERENCE_DEFAULTS: Mapping[str, Any] = {"load_format": "auto", "max_num_seqs": 1024, "enforce_eager": True}
"""verl's own for its one ready-made teacher, which an entry of ours does not inherit."""


def _inference(config: Config) -> dict[str, Any]:
    longest = prompt_tokens(config) + response_tokens(config)
    return {
        "name": config.cluster.backend,
        "dtype": config.models.teacher_dtype or config.models.dtype,
        "temperature": 1.0,
        "prompt_length": prompt_tokens(config),
        "response_length": response_tokens(config),
        "max_model_len": longest + 1,  # verl's teacher writes one token to be asked for the scores of the others
        "tensor_model_parallel_size": config.cluster.teacher_tensor_parallel,
        "gpu_memory_utilization": config.cluster.teacher_memory_share,
    }


def _trainer(config: Config, where: Places, shared: Pools, resume: Path | None, *, evaluate_first: bool) -> Pairs:
    yield "trainer.use_v1", True
    yield "trainer.nnodes", shared.student.nodes
    yield "trainer.n_gpus_per_node", shared.student.gpus_per_node
    yield "trainer.total_training_steps", config.steps
    yield "trainer.total_epochs", 1  # the file of prompts holds all steps
    yield "trainer.save_freq", config.checkpoint.every
    yield "trainer.max_actor_ckpt_to_keep", config.checkpoint.keep
    yield "trainer.default_local_dir", str(where.checkpoints)
    yield "trainer.resume_mode", "disable" if resume is None else "resume_path"
    yield "trainer.resume_from_path", None if resume is None else str(resume)
    yield "trainer.val_before_train", evaluates(config) and (resume is None or evaluate_first)
    yield "trainer.test_freq", config.eval.every if evaluates(config) else -1
    yield "trainer.validation_data_dir", str(where.validation) if evaluates(config) else None
    yield "trainer.logger", ["file"]
    yield "trainer.project_name", config.tracking.project
    yield "trainer.experiment_name", where.run.name
