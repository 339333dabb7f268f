"""Teachers without a network: dialects, routes, prompts of their own, settings, overlap, and what our server accepts."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hostile_teacher import honest, truth
from iwopd.config import ConfigError, config_toml, load_config, make_config
from iwopd.data.chat import Chat, ChatError
from iwopd.data.teacher_view import PromptTemplate, teacher_prompt
from iwopd.teacher.dialects import DIALECTS
from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.refusals import RefusalError
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.teacher.serving import ServingError, TeacherServer, completion, read_request
from iwopd.teacher.serving_model import ServingModel
from iwopd.teacher.sglang_dialect import SglangDialect
from iwopd.teacher.vllm_dialect import VllmDialect
from iwopd.train.pipeline import Scoring
from iwopd.train.teachers import scores_early
from iwopd.types import Prompt, Rollout
from models import byte_tokenizer, make_model
from waiting import PATIENCE, wait_until

# --- dialects --------------------------------------------------------------------------------------------------------

SEQUENCES = [TokenSequence((1, 2, 3, 4, 5), 2), TokenSequence((6, 7, 8), 1)]


def sglang_answer() -> list[dict[str, Any]]:
    """As SGLang answers: [log-prob, id, text] from `logprob_start_len` on, the first without a log-prob."""
    answer = []
    for sequence in SEQUENCES:
        values = [None, *truth(sequence.ids)[sequence.start - 1 :]]
        ids = sequence.ids[sequence.start - 1 :]
        entries = [[value, token, None] for value, token in zip(values, ids, strict=True)]
        answer.append({"text": "", "meta_info": {"input_token_logprobs": entries, "output_token_logprobs": [[-0.5, 9, None]]}})
    return answer


def test_both_dialects_read_the_same_log_probs() -> None:
    wanted = [torch.tensor(truth(sequence.ids)[sequence.start - 1 :]) for sequence in SEQUENCES]
    vllm_answer = honest([sequence.ids for sequence in SEQUENCES])
    for found in (VllmDialect().scores(vllm_answer, SEQUENCES), SglangDialect().scores(sglang_answer(), SEQUENCES)):
        assert all(torch.equal(one.logprobs, other) for one, other in zip(found, wanted, strict=True))
    assert DIALECTS["sglang"]().drawn(sglang_answer()).id == 9


def test_what_is_asked() -> None:
    body = DIALECTS["vllm"]().scoring("m", SEQUENCES)
    assert body["prompt"] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert (body["max_tokens"], body["prompt_logprobs"], body["return_token_ids"]) == (1, 0, True)
    body = DIALECTS["sglang"]().scoring("m", SEQUENCES)
    assert body["logprob_start_len"] == [1, 0]
    assert body["sampling_params"]["max_new_tokens"] == 0


def spoil(change: Any) -> Any:
    answer = sglang_answer()
    change(answer[0]["meta_info"]["input_token_logprobs"])
    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (spoil(lambda entries: entries.pop()), "not those that were sent"),
        (spoil(lambda entries: entries.pop(0)), "not those that were sent"),
        (spoil(lambda entries: entries[1].__setitem__(1, 99)), "first difference is at position 1"),
        (spoil(lambda entries: entries[0].__setitem__(0, -1.0)), "shifted"),
        (spoil(lambda entries: entries[1].__setitem__(0, None)), "not a number"),
        (spoil(lambda entries: entries[1].__setitem__(0, math.nan)), "is nan"),
        (spoil(lambda entries: entries.__setitem__(1, -1.0)), r"where \[log-prob, id, text\] should be"),
        (sglang_answer()[:1], "2 sequences were sent"),
        ({"error": "x"}, "2 sequences were sent"),
        ([{"meta_info": {}}] * 2, "no usable 'input_token_logprobs'"),
    ],
)
def test_sglangs_answers_are_not_believed(answer: Any, message: str) -> None:
    with pytest.raises(TeacherError, match=message):
        DIALECTS["sglang"]().scores(answer, SEQUENCES)


# --- routes ----------------------------------------------------------------------------------------------------------


def rollout(name: str, teacher: str | None = None, prompt: tuple[int, ...] = (3, 4), **metadata: Any) -> Rollout:
    ids = torch.arange(5, 9)
    return Rollout(Prompt(name, prompt, answer="42", teacher=teacher, metadata=metadata), ids, torch.zeros(4), "length")


class Constant(Scorer):
    """A scorer that notes who was sent to it; it may wait for another one to be asked at the same time."""

    def __init__(self, value: float, together: threading.Barrier | None = None) -> None:
        self.value, self.together, self.seen = value, together, []

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        if self.together is not None:
            self.together.wait(timeout=PATIENCE)
        self.seen += [(rollout.prompt.id, rollout.prompt.token_ids) for rollout in rollouts]
        return [torch.full((len(rollout),), self.value) for rollout in rollouts]


def test_every_rollout_goes_to_the_teacher_its_prompt_names() -> None:
    local = LocalScorer(make_model("qwen3"))
    together = threading.Barrier(2)  # broken, and the test red, unless servers work at the same time
    math_teacher = Constant(-2.0, together)
    router = RoutedScorer({None: Constant(-1.0, together), "math": math_teacher, "here": local})
    asked = [rollout("a"), rollout("b", "math"), rollout("c", "here"), rollout("d"), rollout("e", "math")]
    found = router.score(asked)
    assert [float(values[0]) for values in found if values[0] in (-1, -2)] == [-1.0, -2.0, -1.0, -2.0]
    assert torch.equal(found[2], local.score([asked[2]])[0])
    assert [name for name, _ in math_teacher.seen] == ["b", "e"]
    assert list(router.local("teacher")) == ["teacher 'here'"]


def test_an_unknown_teacher_is_named_before_training() -> None:
    router = RoutedScorer({None: Constant(-1.0), "math": Constant(-2.0)})
    with pytest.raises(TeacherError, match=r"prompt 'x' asks for the teacher 'code', but there are: 'math'"):
        router.try_out([rollout("x", "code").prompt], vocab_size=21, max_tokens=4)


def test_a_teacher_that_fails_fails_the_step() -> None:
    class Gone(Scorer):
        def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
            raise TeacherGoneError("gone")

    with pytest.raises(TeacherGoneError):
        RoutedScorer({None: Constant(-1.0), "math": Gone()}).score([rollout("a"), rollout("b", "math")])


# --- prompts of their own --------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def test_the_teacher_sees_its_own_prompt_and_the_same_answer() -> None:
    tokenizer = byte_tokenizer()
    template = PromptTemplate(system="You know all.", user="{prompt} Level {level}. The answer is {answer}: {{sic}}.")
    change = teacher_prompt(Chat(tokenizer), template)
    student = rollout("a", messages=CHAT, level=6)
    seen = change(student.prompt)
    wanted = "system: You know all.\nuser: 2+2? Level 6. The answer is 42: {sic}.\nassistant: "
    assert seen.text == wanted
    assert tokenizer.decode(seen.token_ids) == wanted
    inner = Constant(-1.0)
    [values] = PromptedScorer(inner, change).score([student])
    assert len(values) == 4
    assert inner.seen == [("a", seen.token_ids)]
    assert PromptedScorer(inner, change).score([rollout("plain")])
    assert inner.seen[-1] == ("plain", (3, 4))  # an evaluation prompt that is no chat


def test_a_prompt_that_a_template_does_not_fit_is_refused() -> None:
    change = teacher_prompt(Chat(byte_tokenizer()), PromptTemplate(user="{solution}"))
    with pytest.raises(ChatError, match=r"asks for \{solution\}, which prompt 'a' does not have"):
        change(rollout("a", messages=CHAT).prompt)
    with pytest.raises(ChatError, match="'a' is not a chat"):
        change(rollout("a").prompt)


# --- settings --------------------------------------------------------------------------------------------------------

WORLD = {"models": {"world": "clean"}}


def test_settings_survive_a_round_trip(tmp_path: Any) -> None:
    teacher = {
        "urls": ["http://a:1/v1/", "https://b/proxy"],
        "others": {"math": {"model": "x"}, "code": {"urls": ["http://c:2"]}},
    }
    config = make_config({**WORLD, "teacher": teacher})
    assert config.teacher.urls == ["http://a:1", "https://b/proxy"]
    assert scores_early(config)
    assert not scores_early(make_config(WORLD))
    assert not scores_early(make_config({**WORLD, "teacher": teacher, "rollout": {"overlap": False}}))
    (tmp_path / "config.toml").write_text(config_toml(config))
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": {"urls": ["gpu1:8000"]}}, r"a server's URL looks like http://host:8000"),
        ({"teacher": {"urls": ["http://h:99999"]}}, r"a server's URL looks like"),
        ({"teacher": {"urls": ["http://me:secret@h"]}}, "must not hold a password"),
        ({"teacher": {"api_key_env": "sk-secret"}}, "must be the name of an environment variable, not the key itself"),
        ({"teacher": {"urls": ["http://h"]}, "rollout": {"temperature": 0.7}}, "servers score at temperature 1"),
        ({"teacher": {"others": {"m": {"urls": ["http://h"]}}}, "rollout": {"temperature": 0.7}}, "score at temperature 1"),
        ({"teacher": {"others": {"m": {}}}}, "give either model"),
        ({"teacher": {"others": {"m": {"model": "x", "urls": ["http://h"]}}}}, "give either model"),
        ({"teacher": {"others": {"m": {"model": "x", "urlz": []}}}}, "teacher.others.m.urlz"),
        ({"teacher": {"user": "{0}"}}, "is not a field"),
        ({"teacher": {"user": "{prompt.x}"}}, "is not a field"),
        ({"teacher": {"url": ["http://h"]}}, "did you mean 'teacher.urls'"),
    ],
)
def test_wrong_settings_are_answered_and_keys_not_repeated(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_config({**WORLD, **values})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("section", [{}, {"others": {"math": {"model": "org/math", "dialect": "sglang"}}}])
def test_a_dialect_without_servers_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="says how servers are asked, but urls names none"):
        make_config({"models": {"world": "clean"}, "teacher": section or {"dialect": "iwopd"}})
    make_config({"models": {"world": "clean"}, "teacher": {"dialect": "vllm"}})  # the default, as settings are written out


class HeldScorer(Scorer):
    """Scores with the rollout's own ids once it is let go; remembers what it was asked together, fails when it meets id 9."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.let_go = threading.Event()

    def score(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        self.asked.append([rollout.prompt.id for rollout in rollouts])
        assert self.let_go.wait(PATIENCE)
        if any(9 in rollout.response_ids for rollout in rollouts):
            raise TeacherError("id 9")
        return [rollout.response_ids.float() for rollout in rollouts]


def one_rollout(number: int) -> Rollout:
    return Rollout(Prompt(f"p{number}", (1,)), torch.tensor([number]), torch.zeros(1), "eos")


def test_scores_come_back_in_their_places_and_waiting_rollouts_go_together() -> None:
    scorer = HeldScorer()
    scoring = Scoring(scorer)
    first, *others = [3, 0, 5, 1, 2, 4]
    scoring.add(first, one_rollout(first))
    wait_until(lambda: scorer.asked, "the first rollout at the teacher")
    for place in others:
        scoring.add(place, one_rollout(place))
    scorer.let_go.set()
    scoring.close()
    assert [int(score.logprobs) for score in scoring.scores()] == list(range(6))
    assert scorer.asked == [["p3"], ["p0", "p5", "p1", "p2", "p4"]]  # what came while it was busy went together


def test_nobody_writes_on_for_a_teacher_that_has_failed() -> None:
    scorer = HeldScorer()
    scoring = Scoring(scorer)
    scoring.add(0, one_rollout(9))
    scorer.let_go.set()

    def refused() -> bool:
        try:
            scoring.add(1, one_rollout(1))
        except TeacherError as error:
            assert "id 9" in str(error)  # noqa: PT017  # it is refused at some time, not at the first
            return True
        return False

    wait_until(refused, "a refusal")
    with pytest.raises(TeacherError, match="id 9"):
        scoring.scores()


# --- our server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving() -> ServingModel:
    return ServingModel(make_model("qwen3", vocab=32), vocab_size=21, max_length=64)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"prompt": "text"}, 400, "token ids"),
        ({"prompt": []}, 400, "token ids"),
        ({"prompt": [[]]}, 400, "none of them empty"),
        ({"prompt": [[1], 2]}, 400, "token ids"),
        ({"prompt": [True]}, 400, "token ids"),
        ({"prompt": [1.0]}, 400, "token ids"),
        ({"prompt": [-1]}, 400, "out of vocabulary"),
        ({"prompt": [21]}, 400, "out of vocabulary: the model has 21 ids"),
        ({"prompt": [1] * 64}, 400, "do not fit into the 64"),
        ({"max_tokens": 2}, 400, "max_tokens is 2"),
        ({"max_tokens": None}, 400, "max_tokens is None"),
        ({"temperature": 0.5}, 400, "temperature is 0.5"),
        ({"prompt_logprobs": 5}, 400, "prompt_logprobs is 5"),
        ({"model": "other"}, 404, "'other' is not here, only 'm'"),
    ],
)
def test_our_server_refuses_what_it_cannot_do(change: dict[str, Any], status: int, message: str, serving: ServingModel) -> None:
    request = {"model": "m", "prompt": [1, 2], "max_tokens": 1, "prompt_logprobs": 0, **change}
    with pytest.raises(RefusalError, match=message) as refusal:
        read_request(request, "m", serving)
    assert refusal.value.status == status


def whole(*ids: int) -> TokenSequence:
    """As a completion scores it: all but the first id."""
    return TokenSequence(ids, 1)


def test_our_servers_answer_is_read_by_our_client(serving: ServingModel) -> None:
    dialect = DIALECTS["vllm"]()
    request = {"prompt": [[1, 2, 3, 4, 5], [6, 7, 8]], "max_tokens": 1}
    sequences, draw = read_request(request, "m", serving)
    assert (sequences, draw) == ([whole(1, 2, 3, 4, 5), whole(6, 7, 8)], False)
    found = dialect.scores(completion("m", sequences, serving.score(sequences)), SEQUENCES)
    [there] = serving.scorer.score([Rollout(Prompt("", (1, 2)), torch.tensor([3, 4, 5]), torch.zeros(3), "length")])
    assert torch.allclose(found[0].logprobs, there, atol=1e-5)
    assert serving.scorer.lm.vocab_size == 21
    sequences, draw = read_request({**request, "logprobs": 0}, "m", serving)
    assert draw
    drawn = dialect.drawn(completion("m", sequences[:1], serving.score(sequences[:1], draw=True)))
    longer = whole(1, 2, 3, 4, 5, drawn.id)
    [scores] = dialect.scores(completion("m", [longer], serving.score([longer])), [longer])
    assert float(scores.logprobs[-1]) == pytest.approx(drawn.logprob, abs=1e-5)


def test_concurrent_requests_become_one_batch(serving: ServingModel) -> None:
    def ask() -> None:
        for _ in range(5):
            serving.score([whole(1, 2, 3, 4)])

    before = serving.batches
    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert serving.batches - before < 60  # 80 requests


def test_a_model_that_is_broken_says_so_and_the_server_lives_on() -> None:
    model = make_model("qwen3")
    serving = ServingModel(model, vocab_size=21, max_length=64)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(RefusalError, match="not numbers"):
        completion("m", [whole(1, 2)], serving.score([whole(1, 2)]))
    with pytest.raises(ValueError, match="the vocabulary ends at 20"):
        serving.score([whole(1, 10**6)])  # what the door would have refused
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    assert serving.score([whole(1, 2)]).scores[0].logprobs[0] < 0


def test_without_a_token_only_this_machine_is_served() -> None:
    with pytest.raises(ServingError, match="put a secret into"):
        TeacherServer("m", host="0.0.0.0", port=0, token=None)
    with TeacherServer("m", host="127.0.0.1", port=0, token=None) as server:
        port = server.server_address[1]
        with pytest.raises(ServingError, match=f"cannot listen on 127.0.0.1:{port}"):
            TeacherServer("m", host="127.0.0.1", port=port, token=None)
