"""Teachers with another tokenizer: what they read is the student's text, byte for byte, and what they say adds up."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from iwopd.algo.spans import UNSCORED
from iwopd.algo.views import Wanted
from iwopd.config import make_config
from iwopd.data.chat import Chat, ChatError
from iwopd.data.teacher_view import PromptTemplate, foreign_prompt
from iwopd.errors import ConfigError
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.foreign import ForeignScorer, Reader, Reading
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.retokenizing import Retokenizer, whole_characters
from iwopd.teacher.router import RoutedScorer
from iwopd.tiny import build_tokenizer
from iwopd.train.tokenizers import foreign_refuses
from iwopd.types import Prompt, Rollout
from iwopd.vocabulary import Vocabulary, answer_end, special_ids
from models import byte_tokenizer, make_model
from served_teacher import asking, served
from trained_tokenizers import FAMILIES, TEXTS, Family, trained

MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
LETTERS = st.sampled_from(
    [*"aeinot xyz01\n.;", " the", "answer", "  ", "é", "e\u0301", "日", "本", "🎉", "👩‍🚀", "ß", "<think>", "\t"]
)


def student(family: Family) -> Any:
    return trained(family, 440, end="<end>")


def teacher(family: Family) -> Any:
    return trained(family, 560, texts=TEXTS[1:], end="</s>")


@cache
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary.of(tokenizer)


@cache
def kept(ours: Family, theirs: Family) -> Reader:
    return reader(student(ours), teacher(theirs))


def reader(ours: Any, theirs: Any) -> Reader:
    return Reader(ours, theirs, foreign_prompt(Chat(theirs), PromptTemplate()))


def prompt(tokenizer: Any) -> Prompt:
    text, ids = Chat(tokenizer).render(MESSAGES)
    return Prompt("p", ids, text, metadata={"messages": MESSAGES})


def answer_ids(tokenizer: Any, text: str) -> list[int]:
    """As the student would write it after its prompt."""
    asked = prompt(tokenizer)
    ids = [int(i) for i in tokenizer(asked.text + text, add_special_tokens=False)["input_ids"]]
    assert tuple(ids[: len(asked.token_ids)]) == asked.token_ids
    return ids[len(asked.token_ids) :]


def rollout(tokenizer: Any, ids: list[int], *, ended: bool = False) -> Rollout:
    given_ = [*ids, tokenizer.eos_token_id] if ended else ids
    return Rollout(
        prompt(tokenizer), torch.tensor(given_, dtype=torch.long), torch.zeros(len(given_)), "eos" if ended else "length"
    )


def check_spans(found: Reading, ids: list[int], ours: Vocabulary, theirs: Vocabulary) -> None:
    """Both sides of every span have the same bytes; a tokenizer may put a space of its own before a text or after <think>."""
    for span in range(max(found.student, default=-1) + 1):
        written = b"".join(ours.pieces[i] for i, one in zip(ids, found.student, strict=True) if one == span)
        read = b"".join(theirs.pieces[i] for i, one in zip(found.ids, found.teacher, strict=True) if one == span)
        if written != read:
            assert abs(len(written) - len(read)) == 1
            assert written.strip(b" ") == read.strip(b" ")


@pytest.mark.parametrize("theirs", FAMILIES)
@pytest.mark.parametrize("ours", FAMILIES)
@settings(max_examples=8)
@given(letters=st.lists(LETTERS, max_size=14), cut=st.integers(0, 3), ended=st.booleans())
def test_spans_are_the_text_byte_for_byte(ours: Family, theirs: Family, letters: list[str], cut: int, ended: bool) -> None:
    """Whatever is written, and wherever it is cut off, also in the middle of a character."""
    one, other = student(ours), teacher(theirs)
    ids = answer_ids(one, "".join(letters))
    ids = ids[: max(0, len(ids) - cut)]
    found = kept(ours, theirs).read(rollout(one, ids, ended=ended))[1]
    text = b"".join(vocabulary(one).pieces.get(i, b"") for i in ids)
    assert found.lost == 0  # every family here has a token for every byte
    last = [other.eos_token_id] if ended else []
    assert list(found.ids[len(found.ids) - len(last) :]) == last
    read = b"".join(vocabulary(other).pieces[i] for i in found.ids[: len(found.ids) - len(last)])
    wanted = "".join(letters).encode()
    if ours == "sentencepiece-unigram":  # which writes one space for one or none
        wanted = re.sub(b"(^|<think>) ", rb"\1", wanted)
    assert cut or found.bytes == len(wanted)
    assert len(text) >= found.bytes
    if not cut:
        plain, real = (re.sub(b"(^|<think>) ", rb"\1", some) for some in (read, wanted))
        assert plain in (real, wanted)
    if ended:
        assert found.student[-1] == found.teacher[-1] == max(found.student)
    check_spans(found, ids + [one.eos_token_id] * ended, _with_end(one), _with_end(other))


@cache
def _with_end(tokenizer: Any) -> Vocabulary:
    found = vocabulary(tokenizer)
    return Vocabulary({**found.pieces, tokenizer.eos_token_id: b"<the end>"}, found.marks_spaces)


MODELS: dict[str, LocalScorer] = {}


def model(tokenizer: Any, key: str) -> LocalScorer:
    if key not in MODELS:
        MODELS[key] = LocalScorer(make_model("llama", vocab=len(tokenizer), seed=len(key)).eval(), vocab_size=len(tokenizer))
    return MODELS[key]


@pytest.mark.parametrize(("ours", "theirs"), [("byte-level", "sentencepiece-bpe"), ("sentencepiece-unigram", "byte-level")])
@settings(max_examples=8)
@given(letters=st.lists(LETTERS, min_size=1, max_size=14), ended=st.booleans())
def test_the_gaps_of_spans_sum_up_to_the_difference_of_both_log_probs_of_the_text(
    ours: Family, theirs: Family, letters: list[str], ended: bool
) -> None:
    one, other = student(ours), teacher(theirs)
    written = rollout(one, answer_ids(one, "a" + "".join(letters)), ended=ended)  # a space alone may be no text
    own, scorer = model(one, ours), model(other, "other " + theirs)
    [old] = own.score([written])
    read = kept(ours, theirs)
    [scores] = ForeignScorer(scorer, read).look([written])
    assert scores.spans is not None
    assert (scores.spans >= 0).all()
    gaps = [
        float(scores.logprobs[scores.spans == span].sum() - old[scores.spans == span].sum())
        for span in range(int(scores.spans.max()) + 1)
    ]
    whole = float(scorer.score(read.rollouts([written]))[0].double().sum() - old.double().sum())
    assert sum(gaps) == pytest.approx(whole, abs=1e-3)


def test_ids_that_are_special_are_no_text_and_added_tokens_are() -> None:
    one = student("byte-level")
    found = Vocabulary.of(one)
    think, user = one.convert_tokens_to_ids(["<think>", "<|user|>"])
    assert found.pieces[think] == b"<think>"
    assert user in special_ids(one)
    assert user not in found.pieces
    assert answer_end(one) == one.eos_token_id
    other_end = "{% for m in messages %}{{ m['content'] }}<|user|>{% endfor %}"
    assert answer_end(one, other_end, {}) == user
    assert reader(one, one).end == one.eos_token_id
    one = byte_tokenizer(chat=False)
    assert answer_end(one) == 1


def test_special_tokens_in_an_answer_are_not_scored_and_the_rest_is_read_without_them() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    ids = answer_ids(one, "the answer")
    user = one.convert_tokens_to_ids("<|user|>")
    plain = reader(one, other).read(rollout(one, ids))[1]
    for place in range(len(ids) + 1):
        found = reader(one, other).read(rollout(one, [*ids[:place], user, *ids[place:]]))[1]
        assert found.ids == plain.ids
        assert found.student == (*plain.student[:place], UNSCORED, *plain.student[place:])


def test_names_of_special_tokens_that_were_spelled_out_are_text() -> None:
    for theirs in FAMILIES:
        one, other = byte_tokenizer(), teacher(theirs)
        text = "see <|user|> and </s>."
        ids = [int(i) for i in one(text, add_special_tokens=False)["input_ids"]]
        found = reader(one, other).align(ids, before=prompt(other))
        assert not set(found.ids) & special_ids(other)
        if theirs == "sentencepiece-unigram":  # its model has these names among its pieces, and would write nothing else
            assert found.lost == len("<|user|></s>")
        else:
            assert UNSCORED not in found.student
            assert b"".join(vocabulary(other).pieces[i] for i in found.ids).removeprefix(b" ") == text.encode()


def test_a_character_that_is_cut_off_is_scored_by_byte_tokens_where_there_are_some() -> None:
    one = byte_tokenizer()
    ids = [int(i) for i in one("a🎉", add_special_tokens=False)["input_ids"]][:-1]
    found = reader(one, teacher("sentencepiece-bpe")).align(ids)
    assert (found.lost, found.student[-3:]) == (0, (1, 2, 3))
    found = reader(one, build_tokenizer()).align([int(i) for i in one("12🎉3", add_special_tokens=False)["input_ids"]])
    assert found.student == (0, 1, UNSCORED, UNSCORED, UNSCORED, UNSCORED, 2)
    assert (found.bytes, found.lost, len(found.ids)) == (7, 4, 3)


def test_bytes_that_are_no_character_in_the_middle() -> None:
    assert list(whole_characters(b"ab\xff\xfec\xf0\x9f")) == [
        (b"ab", True),
        (b"\xff", False),
        (b"\xfe", False),
        (b"c", True),
        (b"\xf0\x9f", False),
    ]
    for family in FAMILIES:
        writer = Retokenizer(teacher(family))
        units = writer.units(b"the ans\xffwer \xf0\x9f", "<|assistant|>")
        assert all(unit.exact for unit in units)
        pieces = [writer.vocabulary.pieces[i] for unit in units for i in unit.ids]
        assert b"".join(pieces).removeprefix(b" ") == b"the ans\xffwer \xf0\x9f"


@pytest.mark.parametrize("change", [normalizers.Lowercase(), normalizers.NFC()])
def test_what_a_normaliser_changes_is_not_scored_and_counted(change: Any) -> None:
    fresh = byte_tokenizer()
    fresh.backend_tokenizer.normalizer = change
    one = byte_tokenizer()
    text = "say Cafe\u0301 now"
    ids = [int(i) for i in one(text, add_special_tokens=False)["input_ids"]]
    found = reader(one, fresh).align(ids)
    changed = "C" if isinstance(change, normalizers.Lowercase) else "e\u0301"
    start, length = text.encode().index(changed.encode()), len(changed.encode())
    unscored = [place for place, span in enumerate(found.student) if span == UNSCORED]
    assert unscored == list(range(start, start + found.lost))
    assert length <= found.lost <= length + 1  # what stands next to it may be drawn in
    check_spans(found, ids, Vocabulary.of(one), Vocabulary.of(fresh))


def test_a_space_that_only_a_tokenizer_sees_costs_no_span() -> None:
    """SentencePiece writes 'the' after a special token as '▁the'; byte-level BPE does not."""
    for ours, theirs in (("sentencepiece-bpe", "byte-level"), ("byte-level", "sentencepiece-bpe")):
        one, other = student(ours), teacher(theirs)  # type: ignore[arg-type]
        found = reader(one, other).read(rollout(one, answer_ids(one, "the fox")))[1]
        assert found.bytes == 7
        assert UNSCORED not in (*found.student, *found.teacher)


def test_no_token_stands_on_the_border_of_prompt_and_answer() -> None:
    """The teacher has one token for the prompt's last letter and the answer's first: it reads them apart."""
    one, other = byte_tokenizer(), teacher("byte-level")
    pair = next(piece.decode() for piece in vocabulary(other).pieces.values() if len(piece) == 2 and piece.isalpha())
    assert len(other(pair, add_special_tokens=False)["input_ids"]) == 1
    chat = Chat(other, template="{{ messages[0]['content'] }} " + pair[0])
    read = Reader(one, other, foreign_prompt(chat, PromptTemplate()))
    seen, found = read.read(rollout(one, [int(i) for i in one(pair[1] + " the", add_special_tokens=False)["input_ids"]]))
    assert seen.text.endswith(pair[0])
    assert b"".join(vocabulary(other).pieces[i] for i in found.ids) == pair[1].encode() + b" the"
    assert seen.token_ids == tuple(other(seen.text, add_special_tokens=False)["input_ids"])


def test_a_space_that_a_template_writes_before_answers_is_no_part_of_them() -> None:
    """A student whose template puts a space before every answer, under a teacher that begins at once, and the other way."""
    one, other = byte_tokenizer(), teacher("byte-level")
    spaced = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %} {% endif %}{{ m['content'] }}{% endfor %}"
    )
    spaced += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert Chat(one, template=spaced).lead() == " "
    assert Chat(other).lead() == Chat(one).lead() == ""
    see = foreign_prompt(Chat(other), PromptTemplate())
    ids = [int(i) for i in one(" the fox", add_special_tokens=False)["input_ids"]]
    for leads, written, read in (
        ((" ", ""), ids, b"the fox"),
        (("", " "), ids[1:], b" the fox"),
        ((" ", ""), ids[1:], b"the fox"),
    ):
        found = Reader(one, other, see, leads=leads).read(rollout(one, written))[1]
        assert b"".join(vocabulary(other).pieces[i] for i in found.ids) == read
        assert found.bytes == 7
        assert UNSCORED not in (*found.student, *found.teacher)


# --- the scorer -------------------------------------------------------------------------------------------------------


def some_rollouts(tokenizer: Any) -> list[Rollout]:
    texts = ["the answer is 46.", "", "日本 🎉", "def add(a, b):\n    return"]
    return [rollout(tokenizer, answer_ids(tokenizer, text), ended=number % 2 == 0) for number, text in enumerate(texts)]


@pytest.mark.parametrize("dialect", ["iwopd", "vllm"])
def test_a_server_says_what_a_local_teacher_says(dialect: str) -> None:
    one, other = student("byte-level"), teacher("sentencepiece-unigram")
    local = model(other, "served")
    read, asked = reader(one, other), some_rollouts(one)
    wanted = ForeignScorer(local, read).look(asked)
    with served(local.lm.model, vocab_size=len(other)) as server:
        scorer = ForeignScorer(asking(server.url, dialect=dialect), reader(one, other))
        scorer.try_out([prompt(one)], vocab_size=len(one), max_tokens=20)
        found = scorer.look(asked)
        assert scorer.reader.room == 256
    for mine, yours in zip(found, wanted, strict=True):
        assert mine.spans is not None
        assert yours.spans is not None
        assert torch.equal(mine.spans, yours.spans)
        assert torch.allclose(mine.logprobs, yours.logprobs, atol=1e-4)
    assert wanted[1].logprobs.shape == (0,)


def test_a_router_takes_teachers_of_both_kinds() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    same, foreign = model(one, "same"), ForeignScorer(model(other, "served too"), reader(one, other))
    asked = some_rollouts(one)
    router = RoutedScorer({None: same, "far": foreign})
    far = [
        Rollout(Prompt("f", r.prompt.token_ids, r.prompt.text, teacher="far", metadata=r.prompt.metadata), *_rest(r))
        for r in asked
    ]
    found = router.look([*asked, *far])
    assert all(scores.spans is None for scores in found[:4])
    assert all(scores.spans is not None for scores in found[4:])
    assert {path.reader is None for path in router.paths("teacher")} == {True, False}


def _rest(found: Rollout) -> tuple[Any, Any, Any]:
    return found.response_ids, found.rollout_logprobs, found.stop_reason


def test_beyond_the_teachers_context_nothing_is_scored() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    written = rollout(one, answer_ids(one, "the answer is 46, is it not?"), ended=True)
    read = reader(one, other)
    whole = read.read(written)[1]
    read.room = len(read.see(written.prompt).token_ids) + 1 + 8
    found = read.read(written)[1]
    assert len(found.ids) == 8
    scored = max(found.student) + 1
    assert 0 < scored < max(whole.student) + 1
    assert found.student[-1] == UNSCORED
    [scores] = ForeignScorer(model(other, "short"), read).look([written])
    assert int((scores.logprobs != 0).sum()) == scored


def test_what_a_foreign_teacher_cannot_do_is_refused_in_words() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    scorer = ForeignScorer(model(other, "refused"), reader(one, other))
    with pytest.raises(TypeError, match="another tokenizer gives log-probs only, not entropy"):
        scorer.look(some_rollouts(one), Wanted(entropy=True))
    scorer.reader.room = 40
    with pytest.raises(TeacherError, match="has room for 40 tokens"):
        scorer.try_out([prompt(one)], vocab_size=len(one), max_tokens=64)
    with pytest.raises(TeacherError, match="cannot write 100% of the prompts' text"):
        reader(one, build_tokenizer()).check([Prompt("a", tuple(answer_ids(one, "abc")), "abc")])
    with pytest.raises(ChatError, match="no chat template"):
        reader(one, byte_tokenizer(chat=False)).see(prompt(one))
    wrong = reader(one, other)
    wrong.vocabulary = Vocabulary(dict.fromkeys(wrong.vocabulary.pieces, b"##"), False)
    with pytest.raises(TeacherError, match="bytes behind the student's ids are not those of its text"):
        wrong.check([prompt(one)])


def test_prompts_that_are_no_chats_are_their_text() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    seen = reader(one, other).see(Prompt("plain", (5,), "the fox"))
    assert [int(i) for i in other("the fox", add_special_tokens=False)["input_ids"]] == list(seen.token_ids)
    with pytest.raises(ChatError, match="has no text"):
        reader(one, other).see(Prompt("plain", (5,)))


def test_coverage_says_how_two_tokenizers_lie_over_one_another() -> None:
    one, other = student("byte-level"), teacher("sentencepiece-bpe")
    found = reader(one, other).measure_texts(TEXTS)
    assert found.lost == 0
    assert found.unscored == 0
    assert found.spans <= min(found.tokens, found.teacher_tokens)
    assert found.tokens_per_span > 1
    assert 0 < found.alone_share < 1
    same = reader(one, one).measure_texts(TEXTS)
    assert (same.tokens_per_span, same.alone_share, same.ratio) == (1, 1, 1)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"method": {"objective": "divergence"}}, "distributions over the ids of two tokenizers cannot be compared"),
        ({"method": {"weights": "tip"}}, "asks for kl"),
        ({"method": {"weights": "teacher-entropy"}}, "asks for teacher_entropy"),
        ({"method": {"weights": "prune"}}, "asks for top_overlap"),
        ({"method": {"advantage": "baseline"}}, "asks for kl"),
        ({"rollout": {"max_tokens": 64, "horizon": {"type": "drift"}}}, "tokens of an unfinished text"),
        ({"rollout": {"max_tokens": 64, "horizon": {"type": "budget", "tokens": 640}}}, "tokens of an unfinished text"),
        ({"method": {"advantage": "exopd", "weights": "cumulative-share"}}, None),
        ({"method": {"weights": "survival"}, "rollout": {"max_tokens": 64, "horizon": {"type": "fixed", "tokens": 32}}}, None),
    ],
)
def test_methods_that_need_distributions_and_horizons_that_follow_are_refused(
    settings_: dict[str, Any], words: str | None
) -> None:
    config = make_config({"models": {"world": "clean"}, **settings_})
    assert not list(foreign_refuses(config, []))
    found = [f"{one.message}: {one.remedy}" for one in foreign_refuses(config, ["teacher"])]
    assert [words in one for one in found] == [True] if words else not found


def test_the_setting_is_a_word_or_a_place() -> None:
    assert make_config({"models": {"world": "clean"}}).teacher.tokenizer == "auto"
    with pytest.raises(ConfigError):
        make_config({"models": {"world": "clean"}, "teacher": {"tokenizer": 3}})
