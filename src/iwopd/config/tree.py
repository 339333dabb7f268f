"""The whole tree, and what holds between its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from iwopd.config.cluster import Cluster
from iwopd.config.distributions import MOST_IDS, in_words
from iwopd.config.engines import Engines, RolloutSettings, Teacher, engine_type
from iwopd.config.inputs import Data, Lora, Models
from iwopd.config.method import Method
from iwopd.config.others import mix_refused
from iwopd.config.own_teacher import Ema, Reference
from iwopd.config.own_teacher_checks import faults
from iwopd.config.reward import Reward
from iwopd.config.training import CheckpointSettings, Eval, Optim, Tracking
from iwopd.section import Dtype, Place, Repeat, Section

if TYPE_CHECKING:
    from iwopd.algo.head import Precision


class Config(Section):
    """All settings of a training run."""

    seed: Repeat[int] = Field(
        0, ge=0, lt=2**32, description="of prompt order and sampling noise; equal across methods for paired runs"
    )
    steps: Repeat[int] = Field(40, ge=1, description="optimizer steps (rollout batches)")
    threads: Repeat[int | None] = Field(None, ge=1, description="CPU threads; results are bitwise equal only for equal numbers")
    precision: Literal["no", "bf16"] = Field(
        "no", description="mixed precision of the forward passes of the student and its reference (autocast)"
    )
    head_precision: Literal["auto", "float32", "tf32", "bf16"] = Field(
        "auto", description="operands of the output heads' products on a GPU; auto: tf32 where the student runs in bf16"
    )
    rank_timeout: Place[float] = Field(7200.0, gt=0, description="seconds that processes wait for each other")
    models: Models = Field(default_factory=Models.model_construct)
    lora: Lora = Lora()
    data: Data = Data()
    method: Method = Field(default_factory=Method)
    reward: Reward = Reward()
    rollout: RolloutSettings = RolloutSettings()
    engine: Engines = Engines()
    optim: Optim = Optim()
    eval: Repeat[Eval] = Eval()
    checkpoint: Place[CheckpointSettings] = CheckpointSettings()
    teacher: Teacher = Teacher()
    reference: Reference = Reference()
    ema: Ema = Ema()
    tracking: Place[Tracking] = Tracking()
    cluster: Place[Cluster] = Cluster()  # the launcher refuses what its checkpoints cannot follow

    @property
    def compute_dtype(self) -> Dtype:
        """Precision in which the student computes: that of autocast, or of its weights. Engines with a copy of it follow."""
        return "bfloat16" if self.precision == "bf16" else self.models.dtype

    @property
    def head_products(self) -> Precision:
        """The precision that `head_precision` means: that of all heads of a run, so that none makes a gap by itself."""
        if self.head_precision != "auto":
            return self.head_precision
        return "tf32" if self.precision == "bf16" or self.models.dtype != "float32" else "float32"

    @property
    def teacher_stays(self) -> bool:
        """Whether the teacher can read again during the update: it is not offloaded, and no weights of the student's."""
        return not self.models.teacher_offload and self.teacher.source not in ("base", "live")

    @property
    def keeps_average(self) -> bool:
        """Whether a moving average of the student's weights is kept, because somebody scores with it."""
        return self.teacher.source == "ema" or (self.reference.source == "ema" and self.method.made.needs_reference)

    @model_validator(mode="after")
    def _student_can_teach_itself(self) -> Self:
        for fault in faults(self):
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _prompts_exist(self) -> Self:
        if self.models.world is None and self.data.prompts is None and not self.data.sets:
            raise ValueError("without models.world, data.prompts must name a JSONL file of prompts, or data.sets list sets")
        if self.data.sets and (self.models.world is not None or self.data.prompts is not None):
            other = "models.world brings its own prompts" if self.models.world is not None else "data.prompts is the short form"
            raise ValueError(f"data.sets is given, but {other}: leave one of them out")
        return self

    @model_validator(mode="after")
    def _world_renders_its_own(self) -> Self:
        given = [name for name in ("chat_template", "chat_template_kwargs", "prefill") if getattr(self.data, name)]
        if self.models.world is not None and given:
            raise ValueError(f"data.{given[0]} is given, but models.world brings rendered prompts: leave it out")
        return self

    @model_validator(mode="after")
    def _servers_score_at_one(self) -> Self:
        if self.teacher.has_servers and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature is {self.rollout.temperature}, but teacher servers score at temperature 1, and log-probs "
                "of two temperatures make no gap: sample at 1, or use a local teacher"
            )
        return self

    @model_validator(mode="after")
    def _teacher_can_do_it(self) -> Self:
        made = self.method.made
        wanted = made.asks.teacher
        if (words := self.teacher.cannot_give(wanted.names)) is not None:
            raise ValueError(f"the method ({made.who}) needs {in_words(wanted.names)} of the teacher. {words}")
        most = max(made.asks.student.top_k if wanted.chosen else 0, wanted.top_k)
        if self.teacher.has_servers and most > MOST_IDS:
            raise ValueError(
                f"the method ({made.who}) asks for {most} ids of a token, and teacher servers give at most {MOST_IDS}: lower "
                "k, or use a local teacher"
            )
        if wanted.states and self.teacher.others:
            raise ValueError(
                f"the method ({made.who}) needs the teacher's whole distributions, and several teachers have several output "
                "matrices: leave teacher.others out, or look at likely ids only (a divergence: method.support = 'top-k'; the "
                "advantage 'baseline' and the rule 'tip': k above 1)"
            )
        return self

    @model_validator(mode="after")
    def _teacher_fits(self) -> Self:
        models, teacher = self.models, self.teacher
        local = not teacher.urls or any(other.model is not None for other in teacher.others.values())
        given = {"teacher_offload": models.teacher_offload, "teacher_quantize": models.teacher_quantize != "none"}
        if (asked := [name for name, is_set in given.items() if is_set]) and not local:
            raise ValueError(
                f"models.{asked[0]} is for teachers in this process, and all are servers (teacher.urls): leave it out; how a "
                "server keeps its model is its own affair (vLLM: sleep mode, --quantization)"
            )
        weights = getattr(teacher, "source", "model")
        if teacher.cache is not None and weights != "model":
            raise ValueError(
                f"teacher.cache keeps scores of weights that stay the same, and teacher.source = {weights!r} is the student, "
                "which changes: leave teacher.cache out"
            )
        return self

    @model_validator(mode="after")
    def _reward_teaches(self) -> Self:
        reward, made = self.reward, self.method.made
        if reward.added and not made.takes_reward:
            raise ValueError(
                f"reward.coefficient is {reward.coefficient:g}, but method.objective = {made.name!r} has no advantage to add a "
                "reward to: choose objective 'policy-gradient', or set reward.coefficient = 0, which only logs"
            )
        if reward.added and reward.normalize != "none" and self.rollout.samples == 1:
            raise ValueError(
                f"reward.normalize = {reward.normalize!r} compares the rollouts of a prompt, but rollout.samples is 1: set "
                "rollout.samples to 2 or more (8 is usual), or reward.normalize = 'none'"
            )
        if (why := made.needs_reward) and not reward.added:
            raise ValueError(
                f"{why} trains on the reward alone, and there is none (reward.checker is {reward.checker!r}, its coefficient "
                f"{reward.coefficient:g}): set reward.checker and a positive coefficient, or method.advantage = 'opd'"
            )
        if "prompt" in made.needs and self.rollout.samples == 1:
            raise ValueError(
                f"method.weights = {self.method.weights!r} compares the rollouts of a prompt, but rollout.samples is 1, so "
                "all weights would be 1: set rollout.samples to 2 or more, or choose other weights"
            )
        if "correct" in made.needs and reward.checker is None:
            raise ValueError(
                f"method.weights = {self.method.weights!r} asks which rollouts are right, and nobody judges them: set "
                "reward.checker (reward.coefficient = 0 adds no reward), or choose other weights"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_be_sharded(self) -> Self:
        if self.optim.shard and self.lora.quantize != "none":
            raise ValueError(
                f"optim.shard cannot spread quantised weights (lora.quantize = {self.lora.quantize!r}): leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        rollout, engine = self.rollout, engine_type(self.rollout.engine)
        if not engine.restricts and (rollout.top_p < 1 or rollout.top_k):
            raise ValueError(
                f"rollout.top_p is {rollout.top_p} and rollout.top_k {rollout.top_k}: the log-probs of rollout.engine "
                f"{rollout.engine!r} would then be over the ids that were left; set top_p = 1 and top_k = 0, or engine 'local'"
            )
        engine.check(self.engine.of(rollout.engine), trained=True)
        return self

    @model_validator(mode="after")
    def _horizon_can_be_held(self) -> Self:
        rollout, engine = self.rollout, engine_type(self.rollout.engine)
        horizon = rollout.horizon.made
        if horizon.stops_online and not engine.watched:
            raise ValueError(
                f"rollout.horizon.type is {rollout.horizon.type!r}, but answers of rollout.engine {rollout.engine!r} cannot be "
                "stopped while it writes them: choose the horizon 'fixed' or 'growing', or engine 'local', 'vllm' or 'server'"
            )
        if horizon.stops_online and rollout.thinking != "keep":
            raise ValueError(
                f"rollout.thinking is {rollout.thinking!r}, but the horizon {rollout.horizon.type!r} stops answers by the gaps "
                "of all their tokens, thinking included: choose the horizon 'full', 'fixed' or 'growing', or thinking = 'keep'"
            )
        if rollout.max_tokens is not None:  # else a world says how long answers are
            try:
                horizon.check(rollout.max_tokens, rollout.samples)
            except ValueError as error:
                raise ValueError(f"rollout.horizon: {error}") from None
        return self

    @model_validator(mode="after")
    def _others_can_answer(self) -> Self:
        if (why := mix_refused(self.rollout, self.teacher, self.models.world)) is not None:
            raise ValueError(f"rollout.mix: {why}")
        return self
