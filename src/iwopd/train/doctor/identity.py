"""Do ids mean the same to all models: files, vocabularies, special tokens, stop ids, rows of the output matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iwopd.models import end_ids
from iwopd.train.chats import student_rendering
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning
from iwopd.train.tokenizers import foreign_refuses
from iwopd.vocabulary import Agreement, answer_end, compare_vocabularies, template_ending

FAMILY = "choose a pair of one family: the teacher must read the ids that the student writes"
OWN_ROWS = "resize the student's embeddings to its tokenizer, or use its own tokenizer"


def check_files(case: Case, *, loaded: bool = False) -> Iterator[Finding]:
    """Every model can be found; if the hub does not answer, that is a warning, unless the model is `loaded` here next."""
    for member in (member for member in case.members.values() if member.problem):
        problem = member.problem.strip().splitlines()[0]
        if member.unreachable and (member.elsewhere or not loaded):
            message = f"the {member.name} {member.source} was not checked: {problem}"
            yield warning("files", message, "run the doctor where the hub can be reached, or give a local folder")
        else:
            setting = "teacher.tokenizer" if problem.startswith("teacher.tokenizer") else f"models.{member.name}"
            yield failure("files", f"{member.name}: {problem}", f"correct {setting}")
    if case.student.tokenizer is None and not case.student.problem:
        message = f"the student {case.student.source} has no tokenizer"
        yield failure("files", message, "put its tokenizer files next to its weights")
    readable = [member.name for member in case.members.values() if not member.problem]
    if readable:
        world = case.config.models.world
        where = "can be read" if world is None else f"come with the embedded world {world!r}"
        yield passed("files", f"{listed(readable)} {where}")


def check_vocabularies(case: Case) -> Iterator[Finding]:
    """Every id that the student can sample means the same bytes to the others."""
    ours = case.student.tokenizer
    if ours is None:
        return
    for member in (member for member in case.members.values() if member.name != "student"):
        if member.tokenizer is None:
            if not member.problem:
                message = f"the {member.name} has no tokenizer, so only its size can be compared"
                yield warning("vocabulary", message, f"put the tokenizer files of the {member.name} next to its weights")
            continue
        agreement = compare_vocabularies(ours, member.tokenizer)
        if member.name == "teacher" and case.foreign:
            yield from _aligned(case, agreement)
            continue
        if not agreement.same:
            yield failure(
                "vocabulary",
                f"{agreement.example.replace('the teacher', f'the {member.name}')} {member.source} "
                f"({len(agreement.wrong):,} of {agreement.ids:,} ids differ), so their tokenizers differ",
                FAMILY,
            )
        elif agreement.extra:
            yield warning(
                "vocabulary",
                f"{agreement.ids:,} ids mean the same bytes; the {member.name} has {agreement.extra:,} more, which the student "
                "cannot write and its softmax leaves out",
                "nothing to do if these are special tokens; else choose a pair of one family",
            )
        else:
            yield passed("vocabulary", f"{agreement.ids:,} ids mean the same bytes to student and {member.name}")
    highest = max(ours.get_vocab().values())
    if highest >= len(ours):
        lost = f"those above {len(ours) - 1:,} could be neither written nor scored"
        message = f"the student's tokenizer has {len(ours):,} ids, but the highest is {highest:,}: ids have gaps, and {lost}"
        yield failure("vocabulary", message, "fill the gaps with unused tokens (tokenizer.add_tokens) and save it again")


def _aligned(case: Case, agreement: Agreement) -> Iterator[Finding]:
    """A teacher with another tokenizer: what happens, and what cannot be done with it."""
    yield warning(
        "vocabulary",
        f"{agreement.example} {case.teacher.source or ''} ({len(agreement.wrong):,} of {agreement.ids:,} ids differ): their "
        "tokenizers differ, so the teacher reads the answers' text in its own ids, and spans of text are scored instead of "
        "tokens",
        "nothing to do; a teacher of the student's family scores every token (teacher.tokenizer = 'student' insists on one)",
    )
    yield from (failure("vocabulary", *refused) for refused in foreign_refuses(case.config, ["teacher"]))


def check_special_tokens(case: Case) -> Iterator[Finding]:
    """Answers end with a token that student, teacher and chat template agree on."""
    ours = case.student.tokenizer
    if ours is None:
        return
    extra = {word: ours.convert_tokens_to_ids(word) for word in case.config.rollout.stop_tokens}
    stops = end_ids(ours, case.student.generation) | {stop for stop in extra.values() if stop is not None}
    if not stops:
        yield failure(
            "stop ids",
            "neither the student's tokenizer nor its generation config names an end-of-sequence token: no answer would end",
            "set eos_token_id in generation_config.json, or rollout.stop_tokens in the recipe",
        )
        return
    if unknown := [word for word, stop in extra.items() if stop is None]:
        yield failure("stop ids", f"rollout.stop_tokens has {unknown[0]!r}, which is not a token of the student", "correct it")
    if beyond := sorted(stop for stop in stops if stop >= len(ours)):
        message = f"id {beyond[0]:,} should end answers, but the tokenizer has {len(ours):,} ids: it can never be written"
        yield failure("stop ids", message, "correct eos_token_id in the student's generation_config.json")
    words = {stop: ours.convert_ids_to_tokens(stop) for stop in sorted(stops) if stop < len(ours)}
    rendering = student_rendering(case.config)
    ending = template_ending(ours, rendering.template, rendering.kwargs)
    if ending is not None and ending not in stops:
        word = ours.convert_ids_to_tokens(ending)
        yield failure(
            "stop ids",
            f"the chat template ends an answer with {word!r} (id {ending:,}), but sampling stops at {_words(words)} only: "
            "answers would continue to max_tokens",
            f"set rollout.stop_tokens = [{word!r}], or add the id to eos_token_id in generation_config.json",
        )
        return
    teacher = case.teacher
    theirs = end_ids(teacher.tokenizer, teacher.generation) if teacher.tokenizer is not None else frozenset()
    if case.foreign:
        end = answer_end(teacher.tokenizer)
        if end is None:
            message = "the teacher's tokenizer has no end of an answer: nothing will be said of where the student's answers end"
            yield warning("stop ids", message, "set eos_token in the tokenizer_config.json of the teacher")
        else:
            own = _words({end: teacher.tokenizer.convert_ids_to_tokens(end)})
            yield passed("stop ids", f"answers end with {_words(words)}; the teacher reads {own} there")
        return
    if theirs and case.same_ids and not theirs & stops:
        other = {stop: teacher.tokenizer.convert_ids_to_tokens(stop) for stop in sorted(theirs)}
        yield failure(
            "stop ids",
            f"the student's answers end with {_words(words)}, the teacher's with {_words(other)}: the student would be taught "
            "never to end, or not to stop where the teacher does",
            f"set rollout.stop_tokens = {[str(word) for word in other.values()]}, or choose a teacher of the same chat format",
        )
        return
    yield passed("stop ids", f"answers end with {_words(words)}")


def check_rows(case: Case) -> Iterator[Finding]:
    """The output matrices have a row for every id; further rows are masked."""
    ours = case.student.tokenizer
    if ours is None:
        return
    sizes = []
    for member in case.members.values():
        rows = getattr(member.config.get_text_config(), "vocab_size", None) if member.config is not None else None
        if rows is None:
            continue
        sizes.append(f"{member.name} {rows:,}")
        own, whose = (member.tokenizer, "teacher") if member.name == "teacher" and case.foreign else (ours, "student")
        if rows < len(own):
            message = f"the {whose}'s tokenizer has {len(own):,} ids, the {member.name}'s output matrix {rows:,} rows"
            yield failure("output rows", message, FAMILY if member.name != "student" else OWN_ROWS)
            return
    if sizes:
        left_out = "those beyond the real ids are left out of sampling and of every softmax"
        yield passed("output rows", f"{len(ours):,} ids; rows: {', '.join(sizes)}, {left_out}")


def _words(words: dict[int, Any]) -> str:
    return listed(f"{word!r} (id {number:,})" for number, word in words.items())
