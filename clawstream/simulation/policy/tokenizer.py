"""The tokenizer of the policy that simulates a large one: a token per character, and whole template words.

The one rule: encoded text decodes to itself, for printable ASCII, tabs and line feeds; any other character becomes
<unk>. Special tokens and chat template have Qwen3's names, so that `renderers` and SGLang treat it as Qwen3.
"""

import re
import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
END_OF_TEXT = "<|endoftext|>"
END_OF_MESSAGE = "<|im_end|>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_MESSAGE)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE_WORDS = ("assistant", "user", "system", "[user's hint / instruction]")
MAX_CONTEXT_TOKENS = 16_384

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def core(words: tuple[str, ...] = ()) -> Tokenizer:
    """Return the encoder and decoder; its vocabulary is the same, in the same order, each time. `words` are tokens."""
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    made = Tokenizer(
        models.WordLevel(
            {token: i for i, token in enumerate((UNKNOWN, *TEMPLATE_WORDS, *characters, *words))}, unk_token=UNKNOWN
        )
    )
    one_token = "|".join((*map(re.escape, (*words, *TEMPLATE_WORDS)), r"[\s\S]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(one_token), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (UNKNOWN, *SPECIAL)])
    made.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    return made


@cache
def build(words: tuple[str, ...] = ()) -> "PreTrainedTokenizerFast":
    """Return the tokenizer in transformers' form."""
    from transformers import PreTrainedTokenizerFast  # seconds of imports, which a digest does not need

    return PreTrainedTokenizerFast(
        tokenizer_object=core(words),
        unk_token=UNKNOWN,
        eos_token=END_OF_MESSAGE,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>", END_OF_MESSAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT_TOKENS,
    )


def save(folder: Path, words: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template, into `folder`."""
    build(words).save_pretrained(str(folder))
