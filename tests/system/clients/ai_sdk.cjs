// The AI SDK at the gateway, by each of its providers. Arguments: the provider, the gateway's address.
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { generateText, stepCountIs, streamText, tool, Output } = require("ai");
const { z } = require("zod");

const [provider, url] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  responses: () => openai("policy"),
  chat: () => openai.chat("policy"),
  anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("policy"),
};
const model = models[provider]();
const ask = { model, prompt: "What is 2+2?", maxRetries: 0, maxOutputTokens: 200 };
// It knows no policy by name, and would have a tool called in the place of a schema.
const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
const add = tool({
  description: "Adds.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});

async function main() {
  const chat = (await generateText(ask)).text;
  let stream = "";
  for await (const piece of streamText(ask).textStream) stream += piece;
  const first = await generateText({ ...ask, tools: { add }, stopWhen: stepCountIs(3) });
  const messages = [{ role: "user", content: "What is 2+2?" }, ...first.response.messages];
  messages.push({ role: "user", content: "Sure?" });
  const second = (await generateText({ ...ask, prompt: undefined, messages, tools: { add } })).text;
  const seen = { chat, stream, tool: first.text, second };
  const output = Output.object({ schema: z.object({ total: z.number() }) });
  const shaped = { ...ask, prompt: "What is 2+2? Say it as JSON.", output, providerOptions };
  seen.structured = (await generateText(shaped)).output;
  try {
    await generateText({ ...ask, prompt: "x".repeat(9000) });
  } catch (error) {
    seen.error = { name: error.name, status: error.statusCode };
  }
  return seen;
}

main().then((seen) => console.log(JSON.stringify(seen)));
