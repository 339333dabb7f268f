"""vLLM's dialect, for plain log-probs also that of `iwopd serve-teacher`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config.distributions import GIVES
from iwopd.http_clients import BYTES_PER_ANSWER, BYTES_PER_TOKEN, parse
from iwopd.teacher import json_answers as read
from iwopd.teacher.consistency import check_scores
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.questions import Drawn, TokenSequence


class VllmDialect:
    """OpenAI's completions with vLLM's `prompt_logprobs` and `return_token_ids`."""

    gives = GIVES["vllm"]
    path = drawing_path = "/v1/completions"
    limits = "a vLLM server gives no more likeliest ids than its --max-logprobs (20 unless set): start it with more"

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> Any:
        return {
            "model": model,
            "prompt": [list(sequence.ids) for sequence in sequences],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": wanted.top_k,
            "return_token_ids": True,
        }

    def parse(self, content: bytes) -> Any:
        return parse(content)

    def most_bytes(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> int:
        """Prompts are answered, too."""
        per_token = BYTES_PER_TOKEN + read.BYTES_PER_ENTRY * wanted.top_k
        return BYTES_PER_ANSWER + per_token * sum(len(sequence.ids) for sequence in sequences)

    def scores(self, answer: Any, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> list[TokenScores]:
        choices = read.part(answer, "choices", list)
        by_index = {read.part(choice, "index", int): choice for choice in choices}
        if len(choices) != len(sequences) or by_index.keys() != set(range(len(sequences))):
            raise TeacherError(f"{len(sequences)} sequences were sent, the answer has choices {sorted(by_index)}")
        found = [self._read(by_index[place], sequence, wanted.top_k) for place, sequence in enumerate(sequences)]
        for scores, sequence in zip(found, sequences, strict=True):
            check_scores(scores, sequence, wanted)
        return found

    def _read(self, choice: Any, sequence: TokenSequence, k: int) -> TokenScores:
        read.check_echo(read.part(choice, "prompt_token_ids", list, "does it know return_token_ids?"), sequence.ids)
        entries = read.part(choice, "prompt_logprobs", list, "does it know prompt_logprobs?")
        if len(entries) != len(sequence.ids):
            raise TeacherError(f"{len(sequence.ids)} ids were sent, the answer has {len(entries)} prompt_logprobs")
        if entries[0] is not None:
            raise TeacherError("the first id has a log-prob although nothing precedes it: the answer is shifted")
        values, likeliest = [], []
        for place in range(sequence.start, len(entries)):
            token, entry = sequence.ids[place], entries[place]
            if not isinstance(entry, Mapping) or str(token) not in entry:
                raise TeacherError(f"there is no log-prob of id {token} at position {place}: the answer is shifted or cut")
            values.append(_logprob(entry[str(token)], place))
            likeliest += [_likeliest(entry, token, place, k)] if k else []
        return read.with_likeliest(values, likeliest, k) if k else TokenScores(read.floats(values))

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        body = {"model": model, "prompt": [list(ids)], "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        return {**body, "logprobs": 0, "return_token_ids": True}

    def drawn(self, answer: Any) -> Drawn:
        choice = read.first(read.part(answer, "choices", list))
        logprobs = read.part(read.part(choice, "logprobs", dict), "token_logprobs", list)
        token = read.token_id(read.first(read.part(choice, "token_ids", list)))
        return Drawn(token, read.logprob(read.first(logprobs), 0))


def _logprob(entry: Any, place: int) -> float:
    return read.logprob(read.part(entry, "logprob", object), place)


def _likeliest(entry: Mapping[str, Any], token: int, place: int, k: int) -> read.Likeliest:
    """Exactly k: the written token stands beside them where it is none of them. Ranks are not read: equal ones share theirs."""
    ids = [key for key in entry if key.isdecimal() and (len(entry) <= k or key != str(token))]
    if len(ids) != k:
        raise TeacherError(f"{k} likeliest ids were asked for; at position {place} the answer has {len(ids)}")
    return sorted(
        ((_logprob(entry[key], place), read.token_id(int(key[:12]))) for key in ids), key=lambda pair: (-pair[0], pair[1])
    )
