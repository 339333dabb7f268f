"""A scorer over HTTP: any server that returns the log-probs of given token ids, in one or several replicas.

Servers score at temperature 1. What they can say beside log-probs is their dialect's affair (`config.distributions`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.views import NO_ID, NOTHING, TokenScores, Wanted
from iwopd.config.distributions import refusal
from iwopd.config.engines import TeacherSource
from iwopd.http_clients import parse
from iwopd.teacher.checks import check_server
from iwopd.teacher.conversation import Notify, Request, Servers
from iwopd.teacher.dialects import DIALECTS
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.matrix import check_states, fetch_matrix, matrix_facts
from iwopd.teacher.own_dialect import OwnDialect
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.scorer import Follower, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Piece, Prompt, Rollout

EXAMPLES = 4
"""Prompts on which a server is tried out."""
STATES_APART = 2**14
"""Tokens between two checks of hidden states against the output matrix, of which each reads all of it."""


class ServerScorer(Scorer):
    """What a server says of given rollouts."""

    def __init__(
        self, settings: TeacherSource, *, model: str | None = None, name: str = "teacher", notify: Notify = lambda _: None
    ) -> None:
        """`model` is what the servers call it, where `settings` do not say; None: the only one they have."""
        self.settings, self.name = settings, name
        self.model = settings.name or model
        self.dialect = DIALECTS[settings.dialect]()
        self.gives = self.dialect.gives
        self.servers = Servers(settings, name, notify)
        self.room: int | None = None
        """Tokens that all servers can read at once, if they said so when they were tried out."""
        self.vocab_size: int | None = None
        """Ids of the student's tokenizer, once known: a server may have more."""
        self._matrix: OutputMatrix | None = None
        self._unchecked = STATES_APART
        self._fetching = threading.Lock()

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [scores.logprobs for scores in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        sequences = []
        for row, rollout in enumerate(rollouts):
            ids = (*rollout.prompt.token_ids, *rollout.response_ids.tolist())
            given = chosen[row] if chosen is not None and wanted.chosen else None
            sequences.append(TokenSequence(ids, len(rollout.prompt.token_ids), given))
        found = self.look_at(sequences, wanted)
        return found if self.vocab_size is None else [known_ids(scores, self.vocab_size) for scores in found]

    def follow(self, wanted: Wanted = NOTHING) -> ServerFollower:
        """Of chosen ids it says nothing: who chooses them must have read the whole answer."""
        return ServerFollower(self, replace(wanted, chosen=False))

    def look_at(
        self, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING, homes: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """What the servers say of the ids from `start` on, in order; `homes`: the replica that each should be sent to."""
        section = "teacher" if self.name == "teacher" else f"teacher.others.{self.name}"
        if (words := refusal(wanted.names, self.settings.dialect, section)) is not None:
            raise TeacherError(words)
        if wanted.states:
            self.output_matrix()
        if homes is None:
            groups = self._groups(sequences, range(len(sequences)))
        else:
            by_home = [[row for row, one in enumerate(homes) if one == home] for home in range(len(self.servers.replicas))]
            groups = [group for rows in by_home for group in self._groups(sequences, rows)]
        requests = [self._request([sequences[row] for row in rows], wanted) for rows in groups]
        for rows, request in zip(groups, requests, strict=True):
            request.home = None if homes is None else homes[rows[0]]
        found: dict[int, TokenScores] = {}
        for rows, scores in zip(groups, self.servers.answers(requests), strict=True):
            found.update(zip(rows, scores, strict=True))
        scores = [found[row] if row in found else self._nothing(one, wanted) for row, one in enumerate(sequences)]
        if wanted.states:
            self._check_states(sequences, scores)
        return scores

    def _request(self, sequences: Sequence[TokenSequence], wanted: Wanted) -> Request[list[TokenScores]]:
        dialect = self.dialect

        def read(content: bytes) -> list[TokenScores]:
            return dialect.scores(dialect.parse(content), sequences, wanted)

        body = partial(dialect.scoring, self.model, sequences, wanted)
        return Request(dialect.path, body, read, dialect.most_bytes(sequences, wanted))

    def _groups(self, sequences: Sequence[TokenSequence], rows: Sequence[int]) -> list[list[int]]:
        """Rows that travel together, up to `tokens_per_request` tokens, in enough groups to keep every replica busy."""
        rows = [row for row in rows if sequences[row].answer]
        replicas = len(self.servers.replicas)
        most_rows = max(1, -(-len(rows) // (2 * replicas))) if replicas > 1 else len(rows)
        groups: list[list[int]] = []
        room = 0
        for row in sorted(rows, key=lambda row: -len(sequences[row].ids)):
            length = len(sequences[row].ids)
            if not groups or length > room or len(groups[-1]) == most_rows:
                groups.append([])
                room = self.settings.tokens_per_request
            groups[-1].append(row)
            room -= length
        return groups

    def output_matrix(self) -> OutputMatrix:
        """Fetched once, and kept in memory as the server has it."""
        with self._fetching:
            if self._matrix is None:
                if not isinstance(self.dialect, OwnDialect):
                    raise TeacherError(f"servers of teacher.dialect {self.settings.dialect!r} do not send their output matrix")
                facts = matrix_facts(self.servers, self.model)
                self._matrix = fetch_matrix(self.servers, self.model, facts, vocab_size=self.vocab_size)
                self.dialect.matrix = facts
            return self._matrix

    def _check_states(self, sequences: Sequence[TokenSequence], scores: Sequence[TokenScores]) -> None:
        """The first that come, and some of them ever after."""
        self._unchecked += sum(len(one.logprobs) for one in scores)
        if self._unchecked < STATES_APART:
            return
        self._unchecked = 0
        try:
            check_states(self.output_matrix(), sequences, scores)
        except TeacherError as error:
            raise TeacherError(f"{self.servers.who} at {', '.join(self.settings.urls)}: {error}") from None

    def _nothing(self, sequence: TokenSequence, wanted: Wanted) -> TokenScores:
        """Of an answer without tokens."""
        none, rows = torch.empty(0), torch.empty(0, wanted.top_k)
        return TokenScores(
            none,
            none if wanted.entropy else None,
            rows.long() if wanted.top_k else None,
            rows if wanted.top_k else None,
            None if sequence.chosen is None else torch.empty(0, sequence.chosen.shape[1]),
            none if wanted.top_k or wanted.chosen else None,
            self.output_matrix().weight.new_empty(0, self.output_matrix().weight.shape[1]) if wanted.states else None,
        )

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """One for each replica, whose precision is its own affair."""
        for url in self.settings.urls:
            alone = ServerScorer(self.settings.model_copy(update={"urls": [url], "name": self.model}), name=self.name)
            yield ScoringPath(f"{name} ({url})", name, alone, half=True)

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        """The server must have room for the longest prompt and its answer, and say what it is asked."""
        self.vocab_size = vocab_size
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0) + max_tokens
        examples = [prompt.token_ids for prompt in prompts[:EXAMPLES]]
        check_server(self, vocab_size=vocab_size, longest=longest, examples=examples, wanted=wanted)

    def ask(self, path: str, body: Any = None, read: Callable[[bytes], Any] = parse) -> dict[str, Any]:
        """The responses of all reachable servers to one request, by URL; waits until at least one responds."""
        return self.servers.ask(path, body, read)


class ServerFollower(Follower):
    """Sends answers again whenever they are longer, always to the same replica, and takes the scores of what is new.

    A server that keeps what it has read (`iwopd serve-teacher`; SGLang) reads only that, too.
    """

    def __init__(self, scorer: ServerScorer, wanted: Wanted) -> None:
        self._scorer, self._wanted = scorer, wanted
        self._ids: dict[int, tuple[int, ...]] = {}
        """Prompt and answer so far."""
        self._homes: dict[str, int] = {}
        """Replicas by prompt: the samples of a prompt begin alike."""

    def read(self, pieces: Sequence[Piece]) -> list[TokenScores]:
        sequences, homes = [], []
        for piece in pieces:
            before = self._ids.get(piece.row, piece.prompt.token_ids)
            sequences.append(TokenSequence((*before, *piece.ids.tolist()), len(before), more=not piece.ended))
            homes.append(self._homes.setdefault(piece.prompt.id, len(self._homes) % len(self._scorer.servers.replicas)))
        found = self._scorer.look_at(sequences, self._wanted, homes)
        self._ids.update({piece.row: sequence.ids for piece, sequence in zip(pieces, sequences, strict=True)})
        size = self._scorer.vocab_size
        return found if size is None else [known_ids(scores, size) for scores in found]

    def leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._ids.pop(row, None)


def known_ids(scores: TokenScores, vocab_size: int) -> TokenScores:
    """Likeliest ids that the student does not have go to the rest: `NO_ID` at the end, with log-prob -inf."""
    if scores.top_ids is None or scores.top_logprobs is None or scores.rest is None:
        return scores
    unknown = scores.top_ids >= vocab_size
    if not bool(unknown.any()):
        return scores
    lost = scores.top_logprobs.masked_fill(~unknown, -torch.inf).logsumexp(-1)
    order = unknown.int().argsort(dim=-1, stable=True)
    ids, logprobs = scores.top_ids.masked_fill(unknown, NO_ID), scores.top_logprobs.masked_fill(unknown, -torch.inf)
    return replace(
        scores, top_ids=ids.gather(-1, order), top_logprobs=logprobs.gather(-1, order), rest=torch.logaddexp(scores.rest, lost)
    )
