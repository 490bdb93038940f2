"""Python SDKs at a gateway, each in its own way: run in an environment of their own, it prints what they saw as JSON.

Arguments: the gateway's address, and the client's name.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel

URL, CLIENT = sys.argv[1:]
BASE, KEY = f"{URL}/v1", "none"
ASK, AS_JSON = "What is 2+2?", "What is 2+2? Say it as JSON."
Seen = dict[str, Any]


class Sum(BaseModel):
    total: int


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


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


def litellm() -> Seen:
    import litellm as sdk

    sdk.suppress_debug_info = True
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    def ask(messages: list[Any], **more: Any) -> Any:
        return sdk.completion(model="openai/policy", api_base=BASE, api_key=KEY, messages=messages, **more)

    def said(text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    first = ask(said(ASK), tools=[tool]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
    anthropic = sdk.completion(model="anthropic/policy", api_base=URL, api_key=KEY, messages=said(ASK), max_tokens=50)
    responses = sdk.responses(model="openai/policy", api_base=BASE, api_key=KEY, input=ASK)
    return {
        "chat": ask(said(ASK)).choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in ask(said(ASK), stream=True)),
        "tool": ask([*said(ASK), first.model_dump(), result], tools=[tool]).choices[0].message.content,
        "structured": json.loads(ask(said(AS_JSON), response_format=Sum).choices[0].message.content),
        "as_anthropic": anthropic.choices[0].message.content,
        "by_responses": responses.output[0].content[0].text,
        "error": error_of(ask, said("x" * 9000)),
    }


def langchain() -> Seen:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    found: Seen = {}
    openai_s: dict[str, Any] = {"base_url": BASE, "api_key": KEY, "model": "policy", "max_retries": 0}
    models = {
        "chat": ChatOpenAI(**openai_s),
        "responses": ChatOpenAI(**openai_s, use_responses_api=True),
        "anthropic": ChatAnthropic(base_url=URL, api_key=KEY, model_name="policy", max_tokens=50, max_retries=0),
    }
    for name, model in models.items():
        agent = create_agent(model, [add])
        ended = agent.invoke({"messages": [{"role": "user", "content": ASK}]})
        found |= {
            f"{name}: chat": model.invoke(ASK).text,
            f"{name}: stream": "".join(chunk.text for chunk in model.stream(ASK)),
            f"{name}: tool": ended["messages"][-1].text,
            f"{name}: error": error_of(model.invoke, "x" * 9000),
        }
    shaped = models["chat"].with_structured_output(Sum, method="json_schema")
    return found | {"structured": shaped.invoke(AS_JSON).model_dump()}


def pydantic_ai() -> Seen:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=BASE, api_key=KEY)
    chat = OpenAIChatModel("policy", provider=provider)
    models: dict[str, Any] = {
        "chat": chat,
        "responses": OpenAIResponsesModel("policy", provider=provider),
    }

    async def ask() -> Seen:
        found: Seen = {}
        for name, model in models.items():
            async with Agent(model).run_stream(ASK) as result:
                streamed = await result.get_output()
            with Raised() as raised:
                await Agent(model).run("x" * 9000)
            found |= {
                f"{name}: chat": (await Agent(model).run(ASK)).output,
                f"{name}: stream": streamed,
                f"{name}: tool": (await Agent(model, tools=[add]).run(ASK)).output,
                f"{name}: error": raised.name,
            }
        native = await Agent(chat, output_type=NativeOutput(Sum)).run(AS_JSON)
        both = await Agent(chat, output_type=NativeOutput(Sum), tools=[add]).run(AS_JSON)
        called = [part.part_kind for message in both.all_messages() for part in message.parts]
        return found | {
            "structured": native.output.model_dump(),
            "structured, with a tool": [both.output.model_dump(), called.count("tool-return")],
        }

    return asyncio.run(ask())


def instructor() -> Seen:
    import instructor as sdk
    from openai import OpenAI

    client = OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": AS_JSON}], "max_retries": 0}
    shaped = sdk.from_openai(client, mode=sdk.Mode.JSON_SCHEMA).create(response_model=Sum, **asked)
    partial = list(sdk.from_openai(client, mode=sdk.Mode.JSON_SCHEMA).create_partial(response_model=Sum, **asked))
    asked["messages"] = [{"role": "user", "content": "x" * 9000}]
    failing = sdk.from_openai(client, mode=sdk.Mode.JSON_SCHEMA)
    return {
        "structured": shaped.model_dump(),
        "stream": partial[-1].model_dump(),
        "error": error_of(failing.create, response_model=Sum, **asked),
    }


def smolagents() -> Seen:
    from smolagents import OpenAIServerModel, tool

    model = OpenAIServerModel(model_id="policy", api_base=BASE, api_key=KEY)
    said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    calling = model.generate(said, tools_to_call_from=[tool(add)], tool_choice="auto")
    return {
        "chat": model.generate(said).content,
        "stream": "".join(delta.content or "" for delta in model.generate_stream(said)),
        "tool": calling.tool_calls[0].function.name,
        "error": error_of(model.generate, [{"role": "user", "content": "x" * 9000}]),
    }


def agents() -> Seen:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)
    set_default_openai_client(AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))
    plain: Any = Agent(name="a", model="policy", instructions="Be brief.")
    tooled: Any = Agent(name="a", model="policy", tools=[function_tool(add)])
    shaped: Any = Agent(name="a", model="policy", output_type=Sum)
    both: Any = Agent(name="a", model="policy", output_type=Sum, tools=[function_tool(add)])
    unkept: Any = Agent(name="a", model="policy", model_settings=ModelSettings(store=False))

    async def stream() -> str:
        running = Runner.run_streamed(plain, ASK)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    async def error() -> str:
        with Raised() as raised:
            await Runner.run(plain, "x" * 9000)
        return raised.name

    async def ask() -> Seen:
        first = await Runner.run(tooled, ASK)
        second = await Runner.run(tooled, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
        third = await Runner.run(plain, "Sure?", previous_response_id=second.last_response_id)
        fourth = await Runner.run(both, AS_JSON)
        called = [item.type for item in fourth.new_items]
        return {
            "chat": (await Runner.run(unkept, ASK)).final_output,
            "stream": await stream(),
            "tool": [str(one.final_output) for one in (first, second, third)],
            "structured": (await Runner.run(shaped, AS_JSON)).final_output.model_dump(),
            "structured, with a tool": [fourth.final_output.model_dump(), called.count("tool_call_output_item")],
            "error": await error(),
        }

    return asyncio.run(ask())


print(json.dumps(globals()[CLIENT](), default=str))
