"""The tokenizer of the embedded world: 21 tokens, a chat template, and otherwise a tokenizer like any other.

A user message is an expression; the generation prompt is the `?` behind it, so a prompt of six operands has 12 tokens:

    [{"role": "user", "content": "9+3+7+5*4+1"}]  ->  9+3+7+5*4+1?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iwopd.tiny.task import OPERATORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer. Text it has no token for is an error, not a guess."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
