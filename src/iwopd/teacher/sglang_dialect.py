"""SGLang's own `/generate`. Written from its sources; never run against a real server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config.distributions import GIVES
from iwopd.http_clients import BYTES_PER_ANSWER, BYTES_PER_TOKEN, parse
from iwopd.teacher import json_answers as read
from iwopd.teacher.consistency import check_scores
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.questions import Drawn, TokenSequence


class SglangDialect:
    """Entries are [log-prob, id, text], for the written tokens and for lists of the likeliest ids."""

    gives = GIVES["sglang"]
    path = drawing_path = "/generate"
    limits = "ask for fewer of them"

    def scoring(self, model: str | None, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> dict[str, Any]:
        return {
            "input_ids": [list(sequence.ids) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The entry at this position has no log-prob: they begin one token later.
            "logprob_start_len": [sequence.start - 1 for sequence in sequences],
            "top_logprobs_num": wanted.top_k,
        }

    def parse(self, content: bytes) -> Any:
        return parse(content)

    def most_bytes(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> int:
        per_token = BYTES_PER_TOKEN + read.BYTES_PER_ENTRY * wanted.top_k
        return BYTES_PER_ANSWER + per_token * sum(len(sequence.ids) for sequence in sequences)

    def scores(self, answer: Any, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> list[TokenScores]:
        if not isinstance(answer, list) or len(answer) != len(sequences):
            raise TeacherError(f"{len(sequences)} sequences were sent, the answer is {read.brief(answer)}")
        found = [self._read(item, sequence, wanted.top_k) for item, sequence in zip(answer, sequences, strict=True)]
        for scores, sequence in zip(found, sequences, strict=True):
            check_scores(scores, sequence, wanted)
        return found

    def _read(self, item: Any, sequence: TokenSequence, k: int) -> TokenScores:
        about = read.part(item, "meta_info", dict)
        entries = [read.pair(entry) for entry in read.part(about, "input_token_logprobs", list)]
        read.check_echo([token for _, token in entries], sequence.ids[sequence.start - 1 :])
        if entries[0][0] is not None:
            raise TeacherError("the entry before the first scored id has a log-prob: the answer is shifted")
        values = [read.logprob(value, sequence.start + place) for place, (value, _) in enumerate(entries[1:])]
        if not k:
            return TokenScores(read.floats(values))
        lists = read.part(about, "input_top_logprobs", list, "does it know top_logprobs_num?")
        if len(lists) != len(entries) or lists[0] is not None:
            raise TeacherError(f"the lists of likeliest ids are shifted or cut: {len(lists)} of them for {len(entries)} tokens")
        return read.with_likeliest(values, [_likeliest(one, sequence.start + n, k) for n, one in enumerate(lists[1:])], k)

    def drawing(self, model: str | None, ids: Sequence[int]) -> dict[str, Any]:
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": [list(ids)], "sampling_params": params, "return_logprob": True}

    def drawn(self, answer: Any) -> Drawn:
        entries = read.part(read.part(read.first(answer), "meta_info", dict), "output_token_logprobs", list)
        value, token = read.pair(read.first(entries))
        return Drawn(read.token_id(token), read.logprob(value, 0))


def _likeliest(entries: Any, place: int, k: int) -> read.Likeliest:
    if not isinstance(entries, list) or len(entries) != k:
        found = read.brief(entries)
        raise TeacherError(f"{k} likeliest ids were asked for; at position {place} the answer has {found}")
    pairs = (read.pair(entry) for entry in entries)
    return [(read.logprob(value, place), read.token_id(token)) for value, token in pairs]
