"""Python SDKs at a gateway whose engine computes: each asks, streams, has to call a tool, and asks for too much.

Run in an environment of its own, it prints what it saw as JSON. Arguments: the gateway's address, the client's name.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import BaseModel

URL, CLIENT = sys.argv[1:]
BASE, KEY = f"{URL}/v1", "none"
ASK, TOO_LONG = "What is 2+2?", "x" * 20_000
MAX_TOKENS = 100
Seen = dict[str, Any]
SAID: list[Any] = [{"role": "user", "content": ASK}]
PARAMETERS = {
    "type": "object",
    "properties": {"style": {"type": "string", "enum": ["plain", "formal"]}},
    "required": ["style"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "choose", "description": "Choose.", "parameters": PARAMETERS}}


Style = Literal["plain", "formal"]


class Chosen(BaseModel):
    style: Style


def choose(style: str) -> str:
    """Choose a style.

    Args:
        style: Which one.
    """
    return style


class Raised:
    """Takes in what its block raises, by name."""

    name = "nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.name = "nothing" if kind is None else kind.__name__
        return kind is not None


def error_of(ask: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """The name of what asking raises."""
    with Raised() as raised:
        ask(*arguments, **more)
    return raised.name


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def openai() -> Seen:
    import openai as sdk

    client = sdk.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)

    def ask(messages: list[Any], **more: Any) -> Any:
        asked: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
        return client.chat.completions.create(**asked | more)

    whole = ask(SAID)
    stream = "".join(chunk.choices[0].delta.content or "" for chunk in ask(SAID, stream=True))
    call = ask(SAID, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0].function
    return {
        "chat": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": stream,
        "forced": [call.name, json.loads(call.arguments)],
        "error": error_of(ask, said(TOO_LONG)),
    }


def anthropic() -> Seen:
    import anthropic as sdk

    client = sdk.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    tool = {"name": "choose", "description": "Choose.", "input_schema": PARAMETERS}

    def ask(messages: list[Any], **more: Any) -> Any:
        asked: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
        return client.messages.create(**asked | more)

    whole = ask(SAID)
    with client.messages.stream(model="policy", messages=SAID, max_tokens=MAX_TOKENS) as streaming:
        stream = "".join(streaming.text_stream)
    asked = ask(SAID, tools=[tool], tool_choice={"type": "any"})
    call = next(block for block in asked.content if block.type == "tool_use")
    return {
        "chat": "".join(block.text for block in whole.content if block.type == "text"),
        "usage": [whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0), whole.usage.output_tokens],
        "stream": stream,
        "forced": [call.name, call.input],
        "error": error_of(ask, said(TOO_LONG)),
    }


def litellm() -> Seen:
    import litellm as sdk

    sdk.suppress_debug_info = True

    def ask(messages: list[Any], **more: Any) -> Any:
        place = {"model": "openai/policy", "api_base": BASE, "api_key": KEY}
        return sdk.completion(**place, messages=messages, max_tokens=MAX_TOKENS, **more)

    whole = ask(SAID)
    stream = "".join(chunk.choices[0].delta.content or "" for chunk in ask(SAID, stream=True))
    call = ask(SAID, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0].function
    return {
        "chat": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": stream,
        "forced": [call.name, json.loads(call.arguments)],
        "error": error_of(ask, said(TOO_LONG)),
    }


def langchain() -> Seen:
    from langchain_openai import ChatOpenAI

    place: dict[str, Any] = {"base_url": BASE, "api_key": KEY, "model": "policy", "max_tokens": MAX_TOKENS}
    model = ChatOpenAI(**place, max_retries=0)
    whole: Any = model.invoke(ASK)
    stream = "".join(chunk.text for chunk in model.stream(ASK))
    call: Any = model.bind_tools([TOOL], tool_choice="any").invoke(ASK)
    return {
        "chat": whole.text,
        "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "stream": stream,
        "forced": [call.tool_calls[0]["name"], call.tool_calls[0]["args"]],
        "error": error_of(model.invoke, TOO_LONG),
    }


def pydantic_ai() -> Seen:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    settings: Any = {"max_tokens": MAX_TOKENS}

    async def ask() -> Seen:
        plain = Agent(model, model_settings=settings)
        whole = await plain.run(ASK)
        async with plain.run_stream(ASK) as streaming:
            stream = await streaming.get_output()
        forced = await Agent(model, output_type=ToolOutput(Chosen, name="choose"), model_settings=settings).run(ASK)
        with Raised() as raised:
            await plain.run(TOO_LONG)
        used: Any = whole.usage
        usage = used() if callable(used) else used
        return {
            "chat": whole.output,
            "usage": [usage.input_tokens, usage.output_tokens],
            "stream": stream,
            "forced": ["choose", forced.output.model_dump()],
            "error": raised.name,
        }

    return asyncio.run(ask())


def instructor() -> Seen:
    import instructor as sdk
    from openai import OpenAI

    client = sdk.from_openai(OpenAI(base_url=BASE, api_key=KEY, max_retries=0), mode=sdk.Mode.TOOLS)
    asked: dict[str, Any] = {"model": "policy", "max_retries": 0, "max_tokens": MAX_TOKENS, "response_model": Chosen}
    found, whole = client.create_with_completion(messages=SAID, **asked)
    partial = list(client.create_partial(messages=SAID, **asked))
    return {
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "forced": ["Chosen", found.model_dump()],
        "forced stream": [sdk.Partial[Chosen].__name__, partial[-1].model_dump()],
        "error": error_of(client.create, messages=said(TOO_LONG), **asked),
    }


def smolagents() -> Seen:
    from smolagents import OpenAIServerModel, tool

    model = OpenAIServerModel(model_id="policy", api_base=BASE, api_key=KEY, max_tokens=MAX_TOKENS)
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    chooser = tool(choose)
    chooser.inputs["style"]["enum"] = ["plain", "formal"]
    whole = model.generate(parts)
    stream = "".join(delta.content or "" for delta in model.generate_stream(parts))
    call = model.generate(parts, tools_to_call_from=[chooser], tool_choice="required").tool_calls[0].function
    return {
        "chat": whole.content,
        "usage": [whole.token_usage.input_tokens, whole.token_usage.output_tokens],
        "stream": stream,
        "forced": [call.name, json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments],
        "error": error_of(model.generate, said(TOO_LONG)),
    }


def agents() -> Seen:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)
    set_default_openai_client(AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))
    chosen: list[str] = []

    def keep(style: Style) -> str:
        chosen.append(style)
        return style

    settings = ModelSettings(max_tokens=MAX_TOKENS)
    plain: Any = Agent(name="a", model="policy", model_settings=settings)
    forced: Any = Agent(
        name="a",
        model="policy",
        tools=[function_tool(keep, name_override="choose")],
        model_settings=ModelSettings(max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )

    async def ask() -> Seen:
        whole = await Runner.run(plain, ASK)
        streaming = Runner.run_streamed(plain, ASK)
        async for _ in streaming.stream_events():
            pass
        await Runner.run(forced, ASK)
        with Raised() as raised:
            await Runner.run(plain, TOO_LONG)
        usage = whole.raw_responses[0].usage
        return {
            "chat": whole.final_output,
            "usage": [usage.input_tokens, usage.output_tokens],
            "stream": streaming.final_output,
            "forced": ["choose", {"style": chosen[0]}],
            "error": raised.name,
        }

    return asyncio.run(ask())


print(json.dumps(globals()[CLIENT](), default=str))
