// The openai package as a program would use it: node openai_client.cjs SCENARIO BASE_URL; prints what it saw as JSON.
const { OpenAI } = require("openai");

const [scenario, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: scenario === "retry" ? 1 : 0 });
const hello = [{ role: "user", content: "What is 2+2?" }];
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };

async function runTools(stream) {
  const called = [];
  const add = (args) => (called.push(args), String(args.a + args.b));
  const tool = { name: "add", description: "Adds.", parameters, parse: JSON.parse, function: add };
  const runner = client.chat.completions.runTools({
    model: "policy",
    messages: hello,
    tools: [{ type: "function", function: tool }],
    stream,
  });
  let text = "";
  if (stream) runner.on("content", (piece) => (text += piece));
  const final = await runner.finalContent();
  return { called, final, text };
}

async function refusals() {
  const seen = [];
  for (const extra of [{ tool_choice: "required" }, { model: "gpt" }, {}]) {
    try {
      await client.chat.completions.create({ model: "policy", messages: hello, ...extra });
    } catch (error) {
      seen.push({ name: error.constructor.name, status: error.status, code: error.code, message: error.message });
    }
  }
  return { seen };
}

const scenarios = {
  whole: async () => {
    const answer = await client.chat.completions.create({ model: "policy", messages: hello, metadata: { ticket: "1" } });
    return { id: answer.id, text: answer.choices[0].message.content, finish: answer.choices[0].finish_reason };
  },
  stream: async () => {
    const stream = client.chat.completions.stream({
      model: "policy",
      messages: hello,
      stream_options: { include_usage: true },
    });
    const answer = await stream.finalChatCompletion();
    return { text: answer.choices[0].message.content, usage: answer.usage };
  },
  tools: () => runTools(false),
  streamedTools: () => runTools(true),
  refusals,
  retry: () => scenarios.whole(),
  abort: async () => {
    const stream = await client.chat.completions.create({ model: "policy", messages: hello, stream: true });
    for await (const chunk of stream) {
      stream.controller.abort();
      return { id: chunk.id };
    }
  },
};

scenarios[scenario]().then((seen) => console.log(JSON.stringify(seen)));
