"""The tokenizer of the embedded world: a normal fast tokenizer with 21 tokens and a chat template.

A user message is an expression; the generation prompt is the `?` after it, so a prompt of six operands has 12 tokens:

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
    """A new tokenizer. Text that it has no token for is an error."""
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
