"""Model folders that stand in for those of the families: their special tokens, on a tokenizer trained here.

The one rule: what is special, and what is only an added token, is as the family's own tokenizer has it; the words are
ours. No folder has a template of its own, save SmolLM2's, which is its own, and Mistral's: no renderer of that family
exists, so it has ours, written after the format that its makers publish.
"""

# ruff: noqa: RUF001 - DeepSeek's marks

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

_VOCABULARY_TOKENS = 640
_TEXT = (
    "What is the weather in Paris tomorrow? Let me look that up for you.\n"
    "The user wants to know, so I should call the tool first, and then answer in one sentence.\n"
    "I think the answer is 42, because 6 times 7 is 42. Let me check the numbers again.\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "units": "metric"}}\n'
    '[{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]\n'
    "def main():\n    for line in open('notes.txt'):\n        print(line.strip())\n"
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "Sunny, 21 degrees; café, naïve, 東京, 😀.\nassistant user system function analysis final commentary json\n"
)
# Mistral's tool format as its makers' own package writes it for a byte-level tokenizer, version 3.
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0]["content"] if messages[0]["role"] == "system" else none %}
{%- set chat = messages[1:] if system is not none else messages %}
{%- set last = namespace(user=-1) %}
{%- for message in chat %}{% if message["role"] == "user" %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in chat %}
{%- if message["role"] == "user" %}
{%- if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST]" }}
{%- if system is not none and loop.index0 == last.user %}{{ system + "\\n\\n" }}{% endif %}
{{- message["content"] + "[/INST]" }}
{%- elif message["role"] == "assistant" and message.get("tool_calls") %}
{{- "[TOOL_CALLS][" }}
{%- for call in message["tool_calls"] %}
{%- if call["id"] | length != 9 %}{{ raise_exception("a tool call's id has nine letters or digits") }}{% endif %}
{{- '{"name": "' + call["function"]["name"] + '", "arguments": ' + call["function"]["arguments"] | tojson }}
{{- ', "id": "' + call["id"] + '"}' }}{{ ", " if not loop.last }}
{%- endfor %}
{{- "]" + eos_token }}
{%- elif message["role"] == "assistant" %}
{{- message["content"] + eos_token }}
{%- elif message["role"] == "tool" %}
{%- if message["tool_call_id"] | length != 9 %}{{ raise_exception("a tool call's id has nine letters") }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + message["content"] | tojson + ', "call_id": "' + message["tool_call_id"] + '"}' }}
{{- "[/TOOL_RESULTS]" }}
{%- else %}
{{- raise_exception("a message is of the system, the user, the assistant or a tool, not of " + message["role"]) }}
{%- endif %}
{%- endfor %}
"""


# As in SmolLM2's own file, which clawstream/local/packaged_model.py fetches.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A family's tokenizer: `special` tokens, `added` ones that are not special, and where an answer ends."""

    model_type: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    end: str
    begin: str | None = None
    template: str | None = None


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_DEEPSEEK_CALL = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_DEEPSEEK_ROLES = ("<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_MARKS = (_DEEPSEEK_END, *_DEEPSEEK_CALL[:5])
_KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
)
_QWEN3 = Tokens(model_type="qwen3", special=_CHATML, added=(*_CALL, *_THINK), end="<|im_end|>")
_DEEPSEEK = Tokens(
    model_type="deepseek_v3",
    special=(_DEEPSEEK_BEGIN, _DEEPSEEK_END),
    added=(*_DEEPSEEK_ROLES, *_DEEPSEEK_CALL),
    end=_DEEPSEEK_END,
    begin=_DEEPSEEK_BEGIN,
)
FAMILIES: Mapping[str, Tokens] = {
    "qwen3": _QWEN3,
    "qwen3.5": Tokens(
        model_type="qwen3_5",
        special=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        added=(*_CALL, *_THINK),
        end="<|im_end|>",
    ),
    "llama-3": Tokens(
        model_type="llama",
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        end="<|eot_id|>",
        begin="<|begin_of_text|>",
    ),
    "deepseek-v3": _DEEPSEEK,
    # As above with the two thinking marks as tokens, as later checkpoints of the family have them.
    "deepseek-r1": Tokens(
        model_type="deepseek_v3",
        special=_DEEPSEEK.special,
        added=(*_DEEPSEEK.added, *_THINK),
        end=_DEEPSEEK_END,
        begin=_DEEPSEEK_BEGIN,
    ),
    "glm-4.5": Tokens(
        model_type="glm4_moe",
        special=(
            *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        added=(*_CALL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        end="<|endoftext|>",
    ),
    "kimi-k2": Tokens(model_type="kimi_k2", special=_KIMI, end="<|im_end|>"),
    "smollm2": Tokens(
        model_type="llama", special=_CHATML, end="<|im_end|>", begin="<|im_start|>", template=SMOLLM2_TEMPLATE
    ),
    "mistral": Tokens(model_type="mistral", special=_MISTRAL, end="</s>", begin="<s>", template=MISTRAL_TEMPLATE),
}


def make_folder(folder: Path, tokens: Tokens) -> Path:
    """Write a model folder without weights and return it."""
    trained = _trained()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained), eos_token=None, clean_up_tokenization_spaces=False
    )
    fast.add_tokens([AddedToken(text, normalized=False, special=True) for text in tokens.special], special_tokens=True)
    fast.add_tokens([AddedToken(text, normalized=False, special=False) for text in tokens.added])
    fast.eos_token = tokens.end
    if tokens.begin is not None:
        fast.bos_token = tokens.begin
    fast.chat_template = tokens.template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": tokens.model_type}))
    return folder


@functools.cache
def _trained() -> str:
    """A byte-level BPE tokenizer, as JSON."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=_VOCABULARY_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return str(tokenizer.to_str())
