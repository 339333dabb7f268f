"""What is looked at before Ray starts, because verl says it late, in other words, or not at all."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from iwopd.cluster.verl import params
from iwopd.cluster.verl.carrying import carried
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.fields import FIELDS, PROMPT_OF_ITS_OWN
from iwopd.cluster.verl.job import STAND_IN
from iwopd.cluster.verl.pools import Pools, pools
from iwopd.cluster.verl.translate import DEFAULT_TEACHER, model_path, places, prompt_tokens, response_tokens, translate
from iwopd.cluster.verl.wiring import check_wiring
from iwopd.config import Config, flatten
from iwopd.config.engines import STUDENT
from iwopd.eval.answers import special_tags
from iwopd.eval.checkers import prompt_checker
from iwopd.models import ModelSource, load_configs
from iwopd.train.doctor import Finding
from iwopd.train.doctor.case import open_case
from iwopd.train.doctor.chat import check_rendering, check_template
from iwopd.train.doctor.data import check_data
from iwopd.train.doctor.identity import check_files, check_rows, check_special_tokens, check_vocabularies
from iwopd.train.doctor.lengths import check_context
from iwopd.train.horizon import horizon_refuses
from iwopd.train.reward import Unjudged, reward_refuses
from iwopd.types import Prompt
from iwopd.vocabulary import check_same_tokenizer

TUNABLE = (
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.rollout.free_cache_engine",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "trainer.logger",
)
"""Settings of verl that the launcher sets but that a user's own `cluster.overrides` may set otherwise."""


def check_settings(config: Config) -> None:
    """Everything that the settings alone tell; one line per fault."""
    faults = [*_refused(config), *_teachers(config)]
    faults += [f"{one.message}: {one.remedy}" for one in (*horizon_refuses(config), *reward_refuses(config))]
    try:
        faults += _sizes(config, pools(config))
        if not faults:
            carried(config.method, rewarded=config.reward.checker is not None)
            faults += _own_overrides(config)
    except VerlError as error:
        faults.append(str(error))
    if faults:
        raise VerlError("this recipe cannot run on verl as it is:\n  " + "\n  ".join(faults))


def check_installed() -> None:
    """Whether verl and Ray are there, in the version that was tested."""
    for package in ("verl", "ray", "transfer_queue"):
        if importlib.util.find_spec(package) is None:
            raise VerlError(f"--engine verl needs {package}, which is not installed: pip install 'iwopd[verl]'")
    params.check_version()


def examine(config: Config, folder: Path) -> Iterator[Finding]:
    """What the doctor says without weights, but for the memory of this machine: tokenizers, templates, data, contexts."""
    same = config.model_copy(update={"teacher": config.teacher.model_copy(update={"tokenizer": STUDENT})})
    case = open_case(same, folder)  # verl's teacher gets the student's ids
    for check in (
        check_files,
        check_vocabularies,
        check_special_tokens,
        check_rows,
        check_template,
        check_data,
        check_rendering,
    ):
        yield from check(case)
    configs = {member.name: member.config for member in case.members.values() if member.config is not None}
    if configs and not case.data_problem:
        yield from check_context(case, configs)


def check_tokenizer(config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """What verl does with the student's tokenizer, and a checker with the prompts, works."""
    student = model_path(config, "student")
    if not (config.models.world is not None and os.environ.get(STAND_IN)):  # tests replace the agent loop's part for worlds
        found, _ = load_configs(student, trust_remote_code=config.models.trust_remote_code)
        check_wiring(getattr(found, "model_type", None), tokenizer, student)
    if (name := config.reward.checker) is None:
        return
    for refused in Unjudged.find(prompt_checker(name), name, prompts).refuse():
        raise VerlError(f"{refused.message}: {refused.remedy}")
    if tags := special_tags(tokenizer):
        raise VerlError(
            f"reward.checker is {name!r}, and {min(tags.values())} is a special token of the student's tokenizer: verl's "
            "reward workers get answers without special tokens, and the checker looks for it; use the local engine"
        )


def check_other_teachers(config: Config, tokenizer: Any) -> None:
    """Ids mean the same to every further teacher, too; the doctor looks at the first."""
    trust = config.models.trust_remote_code
    for other in config.teacher.others.values():
        check_same_tokenizer(tokenizer, ModelSource.of(str(other.model)), trust_remote_code=trust)


def _refused(config: Config) -> Iterator[str]:
    values = dict(flatten(config.model_dump()))
    for name, treatment in FIELDS.items():  # some settings of [method] exist with some objectives only
        if name in values and treatment.allowed is not None and not treatment.allowed(values[name], config):
            yield f"{name} is {values[name]!r}: {treatment.text}"
    for name in ("student", "teacher"):
        path = getattr(config.models, name)
        if path is not None and path.endswith(".gguf"):
            yield f"models.{name} is {path!r}: {FIELDS[f'models.{name}_gguf_file'].text}"


def _teachers(config: Config) -> Iterator[str]:
    for name, other in config.teacher.others.items():
        place = f"teacher.others.{name}"
        if name == DEFAULT_TEACHER:
            yield f"{place}: the name {name!r} is the first teacher's (models.teacher): choose another"
        if other.urls:
            yield f"{place}.urls is {other.urls!r}: {FIELDS['teacher.urls'].text}, and set {place}.model"
        elif other.model is not None and other.model.endswith(".gguf"):
            yield f"{place}.model is {other.model!r}: {FIELDS['models.teacher_gguf_file'].text}"
        for field, nothing in PROMPT_OF_ITS_OWN.items():
            if (value := getattr(other, field)) != nothing:
                yield f"{place}.{field} is {value!r}: {FIELDS[f'teacher.{field}'].text}"


def _sizes(config: Config, shared: Pools) -> Iterator[str]:
    """Batches, ranks and lengths fit one another."""
    rollout, optim, cluster, student = config.rollout, config.optim, config.cluster, shared.student
    sequence = f"cluster.sequence_parallel is {cluster.sequence_parallel}"
    if student.gpus_per_node % cluster.sequence_parallel:
        yield f"{sequence}, but the student has {student.gpus_per_node} GPUs per machine: choose a divisor"
        return
    if cluster.sequence_parallel > 1 and (attention := config.models.attention) in ("eager", "sdpa"):
        yield f"{sequence}, which needs flash attention, but models.attention is {attention!r}: leave one of them out"
    vllm = config.engine.vllm
    if student.gpus % (parallel := vllm.tensor_parallel):
        yield f"engine.vllm.tensor_parallel is {parallel}, but the student has {student.gpus} GPUs: choose a divisor"
    if rollout.prompts_per_step % optim.mini_batches:
        yield (
            f"rollout.prompts_per_step is {rollout.prompts_per_step}, which optim.mini_batches = {optim.mini_batches} does not "
            "divide: choose a divisor"
        )
        return
    ranks, rows = student.gpus // cluster.sequence_parallel, rollout.prompts_per_step * rollout.samples // optim.mini_batches
    if rows % ranks:
        yield (
            f"an update has {rows} rollouts (rollout.prompts_per_step x samples / optim.mini_batches), which {ranks} ranks "
            f"(the student's {student}, by cluster.sequence_parallel) do not divide, and verl would fill up with empty ones: "
            "change cluster.teacher_gpus or rollout.prompts_per_step"
        )
    try:
        longest = prompt_tokens(config) + response_tokens(config)
    except VerlError as error:
        yield str(error)
        return
    if vllm.max_model_len is not None and vllm.max_model_len < longest:
        yield (
            f"engine.vllm.max_model_len is {vllm.max_model_len}, but data.max_prompt_tokens + rollout.max_tokens is {longest}: "
            "answers would be cut off early; leave it out"
        )


def _own_overrides(config: Config) -> Iterator[str]:
    """A user's own overrides must not undo what the recipe says."""
    plain = config.model_copy(update={"cluster": config.cluster.model_copy(update={"overrides": []})})
    ours = {_key(item) for item in translate(plain, places(plain, Path("run")))}
    for item in config.cluster.overrides:
        key = _key(item)
        if "=" not in item and not item.startswith("~"):
            yield f"cluster.overrides has {item!r}: it should look like trainer.balance_batch=false"
        elif key in TUNABLE:
            continue
        elif key in ours or any(known.startswith(f"{key}.") for known in ours):
            yield f"cluster.overrides sets {key}, which the recipe decides: set it there (docs/cluster.md has the table)"
        elif key.startswith(("distillation.distillation_loss", "distillation.teacher_models")):
            yield f"cluster.overrides sets {key}, which would make it another method or teacher: use [method] and [teacher]"


def _key(override: str) -> str:
    return re.sub(r"^[+~]+", "", override).partition("=")[0]
