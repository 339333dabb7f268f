"""From settings to the parts of a run: models, prompts, sampler, scorers, learner, task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd import tiny
from iwopd.config import Config, ConfigError
from iwopd.data.prompts import PromptOrder, load_prompts
from iwopd.eval.runner import Task
from iwopd.lm import ResponseModel
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.train.learner import Learner
from iwopd.train.ranks import Ranks
from iwopd.types import Prompt, Rollout

Notify = Callable[[str], None]


@dataclass
class Parts:
    """What the loop works with."""

    tokenizer: Any
    student: Any
    order: PromptOrder
    sampler: LocalSampler
    eval_sampler: LocalSampler
    student_scorer: LocalScorer
    teacher_scorer: LocalScorer
    reference_scorer: LocalScorer | None
    learner: Learner
    task: Task | None
    ranks: Ranks
    device: torch.device

    def write(self, prompts: Sequence[Prompt], seed: int, step: int, samples: int) -> list[Rollout]:
        """Rollouts of all prompts, each rank writing its share."""
        return self.ranks.share(prompts, lambda mine: self.sampler.sample(mine, seed=seed, step=step, samples=samples))


def assemble(config: Config, notify: Notify, progress: tiny.Progress | None = None) -> Parts:
    """Load or train the models and build everything from them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    accelerator = Accelerator(mixed_precision=config.precision)
    set_seed(config.seed)
    world = _world(config, progress)
    tokenizer, student, teacher = _models(config, world, accelerator.device)
    vocab_size = len(tokenizer)
    prompts, task = _prompts(config, world, tokenizer, notify)
    stop_ids = _stop_ids(tokenizer, student)
    max_tokens = config.rollout.max_tokens or (world.max_response_tokens if world else 0)
    if not max_tokens:
        raise ConfigError("rollout.max_tokens is needed when no embedded world says how long answers are")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def sampler(temperature: float, top_p: float = 1.0, top_k: int = 0) -> LocalSampler:
        settings = SamplingSettings(max_tokens, temperature, top_p, top_k, stop_ids)
        return LocalSampler(student, settings, pad_id=pad_id, vocab_size=vocab_size)

    def scorer(model: Any, **options: Any) -> LocalScorer:
        return LocalScorer(model, temperature=config.rollout.temperature, vocab_size=vocab_size, **options)

    reference = _reference(config, world, tokenizer, accelerator.device) if config.method.needs_reference else None
    ranks = Ranks()
    lm = ResponseModel(student, temperature=config.rollout.temperature, vocab_size=vocab_size)
    return Parts(
        tokenizer=tokenizer,
        student=student,
        order=PromptOrder(prompts, config.rollout.prompts_per_step, config.seed),
        sampler=sampler(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k),
        eval_sampler=sampler(config.eval.temperature),
        student_scorer=scorer(student, autocast=accelerator.autocast),
        teacher_scorer=scorer(teacher),
        reference_scorer=None if reference is None else scorer(reference),
        learner=Learner(lm, config.optim, config.method, accelerator, ranks),
        task=task,
        ranks=ranks,
        device=accelerator.device,
    )


def _world(config: Config, progress: tiny.Progress | None) -> tiny.World | None:
    models = config.models
    if models.world is None:
        return None
    chosen = {"teacher": models.teacher_size, "student": models.student_size}
    sizes = {name: size for name, size in chosen.items() if size is not None}
    try:
        recipe = tiny.world_recipe(models.world, lineage=models.lineage, **sizes)
    except ValueError as error:
        raise ConfigError(f"models.world: {error}") from None
    return tiny.open_world(recipe, progress=progress)


def _load(config: Config, source: str | Path, device: torch.device) -> Any:
    dtype = getattr(torch, config.models.dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=config.models.trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load a model from {source}: {_why(source, error)}") from None
    return model.to(device)


def _why(source: str | Path, error: Exception) -> str:
    """For a path that does not exist, transformers complains about the form of a hub id."""
    is_path = str(source).startswith(("/", ".", "~")) or str(source).count("/") > 1
    return "there is no such folder" if is_path and not Path(source).exists() else str(error)


def _models(config: Config, world: tiny.World | None, device: torch.device) -> tuple[Any, Any, Any]:
    if world is not None:
        return world.tokenizer, _load(config, world.student, device), _load(config, world.teacher, device).eval()
    assert config.models.student is not None  # the config was validated
    assert config.models.teacher is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.models.student, trust_remote_code=config.models.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {config.models.student}: {_why(config.models.student, error)}"
        ) from None
    student = _load(config, config.models.student, device)
    teacher = _load(config, config.models.teacher, device).eval()
    for name, model in (("student", student), ("teacher", teacher)):
        _check_vocabulary(name, model, tokenizer)
    _check_tokenizer(config.models.teacher, tokenizer, config)
    return tokenizer, student, teacher


def _check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    rows = model.get_output_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise ConfigError(
            f"the student's tokenizer has {len(tokenizer)} ids, the {name}'s output matrix {rows} rows: all models must share "
            "the student's vocabulary"
        )


def _check_tokenizer(source: str, tokenizer: Any, config: Config) -> None:
    """If the teacher brings a tokenizer, its ids must mean what the student's mean."""
    try:
        other = AutoTokenizer.from_pretrained(source, trust_remote_code=config.models.trust_remote_code)
    except (OSError, ValueError):
        return  # it brings none
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, other))
    wrong = next((i for i, token in sorted(ours.items()) if theirs.get(i) != token), None)
    if wrong is not None:
        raise ConfigError(
            f"id {wrong} is {ours[wrong]!r} for the student and {theirs.get(wrong)!r} for the teacher {source}: their "
            "tokenizers differ, so the teacher would score other texts than the student wrote"
        )


def _reference(config: Config, world: tiny.World | None, tokenizer: Any, device: torch.device) -> Any:
    source = config.models.reference or (world.student if world is not None else config.models.student)
    assert source is not None
    model = _load(config, source, device).eval()
    _check_vocabulary("reference", model, tokenizer)
    return model


def _prompts(config: Config, world: tiny.World | None, tokenizer: Any, notify: Notify) -> tuple[Sequence[Prompt], Task | None]:
    if world is not None:
        task = Task("tiny", world.eval_prompts(config.eval.prompts), world.check) if config.eval.prompts else None
        return world.prompts(config.data.train_size), task
    loaded = load_prompts(Path(str(config.data.prompts)), tokenizer, config.data.max_prompt_tokens)
    if loaded.too_long:
        notify(f"{loaded.too_long} prompts have more than {config.data.max_prompt_tokens} tokens and are left out")
    return loaded.prompts, None


def _stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer and of the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
