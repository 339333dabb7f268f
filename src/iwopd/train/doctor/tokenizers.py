"""A teacher with another tokenizer: how its tokens lie over the student's, and the two renderings of a prompt side by side.

Two things are lost against a teacher of the student's family. A span of several tokens has one score, which all of its tokens
get: who of them earned it is not known. And of text that the teacher's tokenizer cannot write it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from iwopd.data.chat import ChatError
from iwopd.teacher.foreign import LEAST_KNOWN, MEASURED, Coverage, Reader
from iwopd.train.doctor.case import Case
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.parts import Parts
from iwopd.train.teachers import foreign_reader
from iwopd.types import Prompt, Rollout

MOST_TOKENS = 3.0
"""Tokens a span, on average, from which on it is a warning: `bench/spans.py` measures what long spans cost."""
MOST_LOST = 0.01
"""Share of the text that the teacher may be unable to write without a warning. Tokenizers with byte tokens lose nothing."""
COLUMN = 52
"""Letters of a line in each of the two columns."""
MOST_LINES = 24
"""Of the columns; the middle of longer ones is left out."""


def check_spans(case: Case) -> Iterator[Finding]:
    """On the prompts: spans, and both renderings of the first one."""
    if not case.foreign:
        return
    reader = foreign_reader(case.config, case.config.teacher, case.student.tokenizer, case.teacher.tokenizer)
    texts = [_content(prompt) for prompt in case.prompts[:MEASURED]]
    if any(texts):
        yield _verdict(reader.measure_texts([text for text in texts if text]), f"on the text of {len(texts)} prompts")
    yield from _renderings(reader, case.prompts[:1])


def check_written_spans(parts: Parts, rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """On what the student writes, for every teacher that reads it in other ids."""
    readers = {path.model_name: path.reader for path in parts.teacher_scorer.paths("teacher")}
    for name, reader in readers.items():
        if isinstance(reader, Reader) and (readable := reader.readable(rollouts)):
            whose = "" if name == "teacher" else f" ({name})"
            yield _verdict(reader.measure(readable), f"on {len(readable)} answers of the student{whose}")


def _verdict(found: Coverage, where: str) -> Finding:
    lost = f"cannot write {100 * found.lost_share:.2g} % of the text" if found.lost else "can write all of the text"
    words = (
        f"{where}: {found.tokens_per_span:.2f} tokens of the student a span ({found.ratio:.2f} of the teacher's for one of the "
        f"student's), {found.alone_share:.0%} of its tokens stand alone, the teacher's tokenizer {lost}"
    )
    if found.lost_share > 1 - LEAST_KNOWN:
        remedy = "choose a teacher whose tokenizer knows this text, or name its right one (teacher.tokenizer)"
        return failure("spans", f"{words}: it could say next to nothing of the answers", remedy)
    if found.lost_share > MOST_LOST:
        remedy = "choose a teacher whose tokenizer has byte tokens, or change the format of the answers"
        return warning("spans", f"{words}: of these parts nothing is learnt", remedy)
    if found.tokens_per_span > MOST_TOKENS:
        remedy = "choose a teacher with shorter tokens, or one of the student's family; larger batches make up for noise"
        message = f"{words}: many tokens share one score (more than {MOST_TOKENS:g} a span), which makes updates noisier"
        return warning("spans", message, remedy)
    return passed("spans", words)


def _content(prompt: Prompt) -> str:
    """What is asked, without a template; all of the text where nobody knows what that is."""
    messages = prompt.metadata.get("messages")
    return "\n".join(str(message["content"]) for message in messages) if messages else prompt.text


def _renderings(reader: Reader, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Nothing is judged: how the first prompt looks to both."""
    for prompt in prompts:
        try:
            seen = reader.see(prompt)
        except ChatError as error:
            yield failure("renderings", str(error), "give the teacher's tokenizer a chat template that takes these messages")
            return
        counts = f"{len(prompt.token_ids):,} ids of the student's tokenizer, {len(seen.token_ids):,} of the teacher's"
        if seen.text == prompt.text:
            yield passed("renderings", f"student and teacher see prompt {prompt.id!r} as the same text: {counts}")
        else:
            message = f"prompt {prompt.id!r} as each of them sees it: {counts}"
            yield Finding("pass", "renderings", message, details=side_by_side(prompt.text, seen.text))


def side_by_side(student: str, teacher: str) -> str:
    """Two texts in two columns of quoted lines, which show blanks at the ends of lines."""
    left, right = (_quoted(text) for text in (student, teacher))
    rows = [f"{one:<{COLUMN}} | {other}".rstrip() for one, other in zip_longest(left, right, fillvalue="")]
    if len(rows) > MOST_LINES:
        half = MOST_LINES // 2
        rows = [*rows[:half], f"[... {len(rows) - 2 * half} more lines]", *rows[-half:]]
    return "\n".join([f"{'student':<{COLUMN}} | teacher", *rows])


def _quoted(text: str) -> list[str]:
    """Lines with their ends written out; a long one in pieces that fit into a column once they are quoted."""
    found = []
    for line in text.splitlines(keepends=True):
        piece = ""
        for letter in line:
            if len(repr(piece + letter)) > COLUMN:
                found.append(repr(piece))
                piece = ""
            piece += letter
        found.append(repr(piece))
    return found
