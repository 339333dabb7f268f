"""Settings of the models and of the data."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from iwopd.config.templates import TemplateKwargs, TemplateText
from iwopd.data.fields import parse_filter
from iwopd.section import Dtype, Place, Section


class Models(Section):
    world: str | None = Field(None, description="embedded world with models and prompts: clean, drift; empty: use paths")
    student_size: str | None = Field(None, description="size of the world's student; empty: the world's default")
    teacher_size: str | None = Field(None, description="size of the world's teacher; empty: the world's default")
    teacher_tokenizer: str | None = Field(
        None, description="tokenizer of the world's teacher: characters (the student's) or pieces; empty: characters"
    )
    lineage: int = Field(0, ge=0, description="which of the world's lineages (data order and initialisation of its models)")
    student: str | None = Field(None, description="student: local folder, hub id or GGUF file (not with a world)")
    teacher: str | None = Field(None, description="teacher: local folder, hub id or GGUF file (not with a world)")
    reference: str | None = Field(None, description="of ExOPD and the auxiliary KL; empty: the student's initial weights")
    student_gguf_file: str | None = Field(None, description="GGUF file in the student's folder or repository")
    teacher_gguf_file: str | None = Field(None, description="GGUF file in the teacher's folder or repository")
    reference_gguf_file: str | None = Field(None, description="GGUF file in the reference's folder or repository")
    student_revision: str | None = Field(None, description="commit, tag or branch of the student on the hub; pin a commit")
    teacher_revision: str | None = Field(None, description="commit, tag or branch of the teacher on the hub")
    reference_revision: str | None = Field(None, description="commit, tag or branch of the reference on the hub")
    dtype: Dtype = Field("float32", description="precision in which models are loaded")
    teacher_dtype: Dtype | None = Field(None, description="precision of the teacher; empty: as dtype")
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = Field(
        None, description="attention implementation of all models; empty: transformers chooses"
    )
    teacher_device: str | None = Field(None, description="of the teacher: cpu, cuda:1, or auto (spread); empty: the student's")
    teacher_offload: Place[bool] = Field(
        False, description="local teachers are on the CPU while the student writes and trains, on its device while they score"
    )
    teacher_quantize: Literal["none", "4bit", "8bit", "int8"] = Field(
        "none", description="local teachers in fewer bits: 4bit, 8bit (bitsandbytes, a GPU), int8 (torchao); docs/teachers.md"
    )
    trust_remote_code: bool = Field(False, description="run model code that a repository brings along")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.world is None and not self.student:
            raise ValueError("give models.world, or both models.student and models.teacher")
        if self.world is not None and (self.student or self.teacher):
            raise ValueError("models.world brings student and teacher; leave models.student and models.teacher out")
        for name in ("student", "teacher", "reference"):
            if getattr(self, name) is None and (getattr(self, f"{name}_gguf_file") or getattr(self, f"{name}_revision")):
                raise ValueError(f"models.{name}_gguf_file and models.{name}_revision need models.{name}")
        return self

    @model_validator(mode="after")
    def _teacher_can_move(self) -> Self:
        if self.teacher_offload and self.teacher_device is not None:
            raise ValueError(
                "models.teacher_offload moves the teacher between the CPU and the student's device, but models.teacher_device "
                f"is {self.teacher_device!r}: leave one of them out"
            )
        if self.teacher_offload and self.teacher_quantize != "none":
            raise ValueError(
                f"models.teacher_offload cannot move quantised weights (models.teacher_quantize = {self.teacher_quantize!r}): "
                "leave one of them out"
            )
        if self.teacher_quantize != "none" and (self.teacher_gguf_file or str(self.teacher).endswith(".gguf")):
            raise ValueError("a GGUF teacher is dequantised when it is loaded: leave models.teacher_quantize out")
        return self


class Lora(Section):
    """Train an adapter instead of the whole student. Needs the extra `lora`."""

    rank: int = Field(0, ge=0, description="rank of the student's LoRA matrices; 0: train all weights")
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    targets: list[str] = Field(
        ["all-linear"], min_length=1, description="layers that get one; all-linear: all but the output matrix"
    )
    quantize: Literal["none", "4bit", "8bit"] = Field(
        "none", description="quantise the frozen weights (QLoRA): needs bitsandbytes and a GPU"
    )

    @model_validator(mode="after")
    def _quantised_base_needs_an_adapter(self) -> Self:
        if self.quantize != "none" and not self.rank:
            raise ValueError("quantised weights cannot be trained: set lora.rank, or lora.quantize = 'none'")
        return self


class DataSet(Section):
    """One entry of `data.sets`; what is left empty is as in the named set, or as `data.sets.PromptSet` has it."""

    source: str = Field(description="deepmath, eurus-code, a JSONL or parquet file, a folder of them, or hub:org/name")
    weight: float = Field(1.0, gt=0, description="share of every step's prompts, relative to the other sets")
    name: str | None = Field(None, min_length=1, description="begins the ids of its prompts")
    files: str | None = Field(None, description="pattern of files, e.g. data/train-*.parquet; empty: the training split")
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    prompt_field: str | None = Field(None, description="name of the field with the prompt: a text or a list of messages")
    messages_field: str | None = Field(None, description="name of the field with a list of messages")
    answer_field: str | None = Field(None, description="name of the field with the answer; '': not read")
    id_field: str | None = Field(None, description="name of the field with the id")
    teacher_field: str | None = Field(None, description="name of the field that names the teacher of a prompt")
    teacher: str | None = Field(None, description="teacher of the prompts that name none")
    keep_fields: list[str] | None = Field(None, description="further parquet columns to keep with a prompt")
    filter: str | None = Field(None, description="e.g. difficulty >= 6 and topic != 'geometry'")
    suffix: str | None = Field(None, description="follows the last user message")
    drop_system: bool | None = Field(None, description="leave system messages out")
    unique: bool | None = Field(None, description="leave prompts out that occurred before")

    @model_validator(mode="after")
    def _filter_reads(self) -> Self:
        if self.filter:
            parse_filter(self.filter)
        return self


class Data(Section):
    prompts: str | None = Field(None, description="JSONL file of training prompts (not with a world)")
    sets: list[DataSet] = Field([], description="training sets and their mixture instead of one file, see docs/data.md")
    train_size: int = Field(4096, ge=1, description="training prompts to draw from an embedded world")
    max_prompt_tokens: int = Field(2048, ge=1, description="longer prompts are left out (and counted), never cut")
    chat_template: TemplateText | None = Field(None, description="file with a Jinja template; empty: the student's tokenizer's")
    chat_template_kwargs: TemplateKwargs = Field(
        default_factory=dict, description="what the chat template is given; enable_thinking is false unless set here"
    )
    prefill: str = Field("", description="beginning of every answer: it ends the prompts and is not trained on")
