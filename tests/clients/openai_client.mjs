// Talks to the server named in the environment and prints what came back, as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const ask = (content) => [{ role: "user", content }];
const report = {};

const whole = await client.chat.completions.create({ model, messages: ask("Hi"), logprobs: true, top_logprobs: 2 });
report.whole = {
  content: whole.choices[0].message.content,
  finish: whole.choices[0].finish_reason,
  second: whole.choices[0].logprobs.content[0].top_logprobs[1].token,
  usage: whole.usage.completion_tokens,
  requestId: whole._request_id,
};

const parts = [];
let usage = null;
const stream = await client.chat.completions.create({
  model,
  messages: ask("Hi"),
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  parts.push(chunk.choices[0]?.delta?.content ?? "");
  usage = chunk.usage ?? usage;
}
report.stream = { content: parts.join(""), usage: usage.completion_tokens };

const runner = client.chat.completions.stream({ model, messages: ask("Hi") });
report.accumulated = await runner.finalContent();

const thought = [];
for await (const chunk of await client.chat.completions.create({
  model,
  messages: ask("think"),
  reasoning_effort: "high",
  stream: true,
})) {
  thought.push(chunk.choices[0].delta.reasoning_content ?? "");
}
report.reasoning = thought.join("");

report.completion = (await client.completions.create({ model, prompt: "Hi" })).choices[0].text;
report.models = (await client.models.list()).data.map((one) => one.id);

const failure = async (work) => {
  try {
    await work();
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, param: error.param ?? null, message: error.message };
  }
  return null;
};
report.bad = await failure(() => client.chat.completions.create({ model, messages: ask("Hi"), n: 9 }));
report.midstream = await failure(async () => {
  for await (const chunk of await client.chat.completions.create({ model, messages: ask("fail"), stream: true })) void chunk;
});
const left = await client.chat.completions.create({ model, messages: ask("wait"), stream: true });
for await (const chunk of left) {
  void chunk;
  break;
}
console.log(JSON.stringify(report));
