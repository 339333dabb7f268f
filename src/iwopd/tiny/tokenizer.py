r"""The tokenizers of the embedded worlds: normal fast tokenizers with a chat template.

A user message is an expression; the generation prompt is the `?` after it, so a prompt of six operands has 12 tokens:

    [{"role": "user", "content": "9+3+7+5*4+1"}]  ->  9+3+7+5*4+1?

`characters` (21 tokens) is that of every student and of most teachers. `pieces` (65 tokens) is that of teachers of another
family: a BPE of the same texts, with other ids and another name of the end. It cuts across the student's tokens:

    characters   6 + 4 = 0 ; 0 * 3 + 8 - 7 + 0 \n    ...   1 \n \boxed{ 1 } <eos>
    pieces       6+ 4 =0; 0* 3+ 8- 7+ 0\n            ...   1 \n\bo xed{ 1 } <|end|>
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iwopd.registry import suggestion
from iwopd.tiny.task import OPERATORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS, PIECES = "characters", "pieces"
TOKENIZERS = (CHARACTERS, PIECES)

PAD, EOS = "<pad>", "<eos>"
TOKENS = (PAD, EOS, *"0123456789", *OPERATORS, "=", ";", "\n", "?", "\\boxed{", "}")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '?' + message['content'] + eos_token }}"
    "{%- else -%}{{ raise_exception('this chat template knows the roles user and assistant, not ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '?' }}{%- endif -%}"
)

LETTERS = "}{xode\\b?\n;=*-+9876543210"
MERGES = (
    *(("\n", "\\"), ("b", "o"), ("d", "{"), ("e", "d{"), ("x", "ed{"), ("\n\\", "bo"), ("0", ";"), ("=", "0;")),
    *zip("0862048506892347641253937", "****+*-*-++*+*-*-+*--+--+", strict=True),
    *(("0", "\n"), ("9", "+"), ("5", "+"), ("7", "-"), ("6", ";")),
)
"""What a BPE trainer finds in 4,000 problems and solutions of six operands, without the merge that would make `\\n\\boxed{`
one token: so there are spans of several tokens on both sides."""
PIECES_PAD, PIECES_END = "<|pad|>", "<|end|>"


def build_tokenizer(name: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A new tokenizer. Text that it has no token for is an error."""
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}{suggestion(name, list(TOKENIZERS))}")
    return _fast(_characters(), PAD, EOS) if name == CHARACTERS else _fast(_pieces(), PIECES_PAD, PIECES_END)


def _characters() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models

    tokens = [*LETTERS, *(left + right for left, right in MERGES), PIECES_PAD, PIECES_END]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES), unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _fast(tokenizer: Any, pad: str, end: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
