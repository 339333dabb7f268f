"""Which teachers have another tokenizer than the student, and what cannot be done with them; before any weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from iwopd.algo.evidence import FURTHER
from iwopd.config import Config, TeacherSource
from iwopd.config.engines import AUTO, STUDENT
from iwopd.errors import ConfigError
from iwopd.models import ModelError, ModelSource, brings_tokenizer, load_configs, load_tokenizer
from iwopd.rollout.horizons import Horizon
from iwopd.train.refusals import Refused
from iwopd.types import Prompt
from iwopd.vocabulary import check_same_tokenizer, compare_vocabularies

TEACHER = "teacher"
RATIO_OF = 64
"""Prompts on which the lengths of two tokenizers are compared."""
WITHOUT_THE_TEACHER = {"student_entropy", "correct", "prompt"}
"""Evidence beside log-probs that asks nothing of the teacher's distributions."""


def sections(config: Config) -> dict[str, TeacherSource]:
    """Every teacher by the name of its section."""
    return {TEACHER: config.teacher, **{f"{TEACHER}.others.{name}": one for name, one in config.teacher.others.items()}}


def foreign_tokenizers(config: Config, tokenizer: Any, teacher: ModelSource | None) -> dict[str, Any]:
    """The tokenizers of teachers whose ids mean something else than the student's, by section; `teacher`: the first's model."""
    found = {}
    for section, source in sections(config).items():
        model = teacher if section == TEACHER else _source(getattr(source, "model", None))
        theirs = teacher_tokenizer(config, section, tokenizer, model)
        if theirs is not None and not compare_vocabularies(tokenizer, theirs).same:
            found[section] = theirs
    return found


def teacher_tokenizer(config: Config, section: str, tokenizer: Any, model: ModelSource | None) -> Any:
    """The teacher's own, if it is to be compared and can be read; None: its ids are taken for the student's."""
    setting, trust = sections(config)[section].tokenizer, config.models.trust_remote_code
    if setting == STUDENT:
        if model is not None and section != TEACHER:  # of the first one the doctor says it
            check_same_tokenizer(tokenizer, model, trust_remote_code=trust)
        return None
    own = None if model is None else read_files(model, trust)[0]
    return own if setting == AUTO else named_tokenizer(config, section, own)


def named_tokenizer(config: Config, section: str, own: Any) -> Any:
    """The one that the settings name; `own`: what a teacher in this process brings, whose ids the named one must write."""
    source = sections(config)[section]
    named = load_tokenizer(source.tokenizer, trust_remote_code=config.models.trust_remote_code)
    if own is None or source.urls:
        return named
    agreement = compare_vocabularies(named, own)
    if not agreement.same:
        raise ConfigError(
            f"{section}.tokenizer is {source.tokenizer!r}, but the teacher is loaded here and brings another one "
            f"({len(agreement.wrong):,} of {agreement.ids:,} ids differ), so it would read other text than was written: leave "
            f"{section}.tokenizer out, it is for servers whose model cannot be read here"
        )
    return named


def foreign_refuses(config: Config, foreign: Collection[str]) -> Iterator[Refused]:
    """What a recipe asks for that a teacher with another tokenizer (by section) cannot give."""
    if not foreign:
        return
    who = f"the {' and '.join(foreign)} {'has' if len(foreign) == 1 else 'have'} another tokenizer than the student"
    made = config.method.made
    remedy = "choose objective 'policy-gradient' with an advantage and weights of log-probs alone, or a teacher of one family"
    apart = "distributions over the ids of two tokenizers cannot be compared"
    if not made.takes_spans:
        yield Refused(f"{who}, but the method ({made.who}) needs more of it than log-probs of a text: {apart}", remedy)
    elif asked := sorted((made.needs & FURTHER.keys()) - WITHOUT_THE_TEACHER):
        yield Refused(f"{who}, but the method ({made.who}) asks for {', '.join(asked)}: {apart}", remedy)
    mix = config.rollout.mix
    if mix.active and mix.objective != "likelihood":
        remedy = "set rollout.mix.objective = 'likelihood'"
        yield Refused(f"{who}, but rollout.mix.objective = {mix.objective!r} compares distributions: {apart}", remedy)
    horizon: Horizon = config.rollout.horizon.made
    if horizon.stops_online:
        yield Refused(
            f"{who}, and rollout.horizon.type = {config.rollout.horizon.type!r} lets it follow answers while they are written: "
            "the tokens of an unfinished text are not those of the finished one",
            "choose the horizon 'fixed' or 'growing'",
        )


def token_ratio(tokenizer: Any, prompts: Sequence[Prompt]) -> float:
    """So many tokens of this tokenizer for one of the student's, on the text of some prompts; at least 1."""
    some = prompts[:RATIO_OF]
    theirs = sum(len(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) for prompt in some)
    return max(1.0, theirs / max(1, sum(len(prompt.token_ids) for prompt in some)))


def read_files(source: ModelSource, trust_remote_code: bool) -> tuple[Any, Any, Any, str]:
    """Tokenizer, config and generation config of a model as far as they can be read, and what went wrong."""
    return (_read_once if source.is_hub_id else _read)(source, trust_remote_code)


def _read(source: ModelSource, trust_remote_code: bool) -> tuple[Any, Any, Any, str]:
    tokenizer = config = generation = None
    try:
        config, generation = load_configs(source, trust_remote_code=trust_remote_code)
        if brings_tokenizer(source):
            tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    except ModelError as error:
        return tokenizer, config, generation, str(error)
    return tokenizer, config, generation, ""


_read_once = lru_cache(maxsize=64)(_read)
"""For the hub: many recipes name the same few models, and a hub that does not answer takes its time."""


def _source(path: str | None) -> ModelSource | None:
    return None if path is None else ModelSource.of(path)


Foreign = Mapping[str, Any]
"""Tokenizers by section of the teacher."""
