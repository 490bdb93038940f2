// JavaScript SDKs at a gateway whose engine computes: each asks, streams, has to call a tool, and asks for too much.
// Arguments: `openai`, or a provider of the AI SDK; the gateway's address.
const [client, url] = process.argv.slice(2);
const ASK = "What is 2+2?";
const TOO_LONG = "x".repeat(20000);
const MAX_TOKENS = 100;

async function openai() {
  const { OpenAI } = require("openai");
  const sdk = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const ask = (content, more) =>
    sdk.chat.completions.create({
      model: "policy",
      max_tokens: MAX_TOKENS,
      messages: [{ role: "user", content }],
      ...more,
    });
  const properties = { style: { type: "string", enum: ["plain", "formal"] } };
  const parameters = { type: "object", properties, required: ["style"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "choose", description: "Choose.", parameters } }];
  const whole = await ask(ASK);
  let stream = "";
  for await (const chunk of await ask(ASK, { stream: true })) stream += chunk.choices[0]?.delta.content ?? "";
  const call = (await ask(ASK, { tools, tool_choice: "required" })).choices[0].message.tool_calls[0].function;
  return {
    chat: whole.choices[0].message.content,
    usage: [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    stream,
    forced: [call.name, JSON.parse(call.arguments)],
    error: await errorOf(() => ask(TOO_LONG)),
  };
}

async function aiSdk(provider) {
  const { createOpenAI } = require("@ai-sdk/openai");
  const { createAnthropic } = require("@ai-sdk/anthropic");
  const { generateText, streamText, tool } = require("ai");
  const { z } = require("zod");
  const sdk = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const models = {
    responses: () => sdk("policy"),
    chat: () => sdk.chat("policy"),
    anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("policy"),
  };
  const asked = { model: models[provider](), prompt: ASK, maxRetries: 0, maxOutputTokens: MAX_TOKENS };
  const choose = tool({ description: "Choose.", inputSchema: z.object({ style: z.enum(["plain", "formal"]) }) });
  const whole = await generateText(asked);
  let stream = "";
  for await (const piece of streamText(asked).textStream) stream += piece;
  const [call] = (await generateText({ ...asked, tools: { choose }, toolChoice: "required" })).toolCalls;
  return {
    chat: whole.text,
    usage: [whole.usage.inputTokens, whole.usage.outputTokens],
    stream,
    forced: [call.toolName, call.input],
    error: await errorOf(() => generateText({ ...asked, prompt: TOO_LONG })),
  };
}

async function errorOf(ask) {
  try {
    await ask();
  } catch (error) {
    const name = error.name === "Error" ? error.constructor.name : error.name;
    return { name, status: error.status ?? error.statusCode };
  }
}

(client === "openai" ? openai() : aiSdk(client)).then((seen) => console.log(JSON.stringify(seen)));
