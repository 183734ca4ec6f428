// The same questions to whatever model the server in the environment has: streamed as whole, calls that are insisted on, and aborts.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const ask = (content) => [{ role: "user", content }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Zürich"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather.", parameters } }];
const chat = { model, temperature: 0, max_tokens: 24 };
const report = {};

const whole = await client.chat.completions.create({ ...chat, messages: ask("Hi") });
const usage = { include_usage: true };
let streamed = "";
let counted = null;
for await (const chunk of await client.chat.completions.create({
  ...chat,
  messages: ask("Hi"),
  stream: true,
  stream_options: usage,
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  counted = chunk.usage ?? counted;
}
report.chat = {
  said: whole.choices[0].message.content.length > 0,
  same: streamed === whole.choices[0].message.content,
  counted: counted.completion_tokens === whole.usage.completion_tokens,
};

const called = (choice) => ({
  finish: choice.finish_reason,
  calls: choice.message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]),
});
const one = { ...chat, messages: ask("Weather?"), tools, tool_choice: "required", parallel_tool_calls: false };
report.required = called((await client.chat.completions.create(one)).choices[0]);
report.requiredStreamed = called((await client.chat.completions.stream(one).finalChatCompletion()).choices[0]);
const named = { ...one, tool_choice: { type: "function", function: { name: "weather" } } };
report.named = called((await client.chat.completions.create(named)).choices[0]);

const form = { type: "json_schema", json_schema: { name: "city", schema: parameters, strict: true } };
const formed = await client.chat.completions.create({ ...chat, messages: ask("City?"), response_format: form });
report.form = Object.keys(JSON.parse(formed.choices[0].message.content));

const flat = [{ type: "function", name: "weather", description: "The weather.", parameters, strict: true }];
const item = { model, temperature: 0, max_output_tokens: 24 };
const response = await client.responses.create({ ...item, input: "Hi" });
report.response = (await client.responses.stream({ ...item, input: "Hi" }).finalResponse()).output_text === response.output_text;
const asked = { ...item, input: "Weather?", tools: flat, tool_choice: "required", parallel_tool_calls: false };
const answer = await client.responses.stream(asked).finalResponse();
report.calls = answer.output.filter((one) => one.type === "function_call").map((one) => [one.name, JSON.parse(one.arguments)]);

const long = { ...chat, messages: ask("wait"), max_tokens: 4000, ignore_eos: true };
const stream = await client.chat.completions.create({ ...long, stream: true });
report.seen = 0;
for await (const chunk of stream) {
  if (chunk.choices[0]?.delta?.content && ++report.seen === 1) stream.controller.abort();
}
report.aborted = stream.controller.signal.aborted;
// One that is left before it has arrived would be no answer that stops.
const leaving = new AbortController();
const under_way = async () => {
  const told = await (await fetch(new URL("/metrics", process.env.BASE_URL))).text();
  await new Promise((go) => setTimeout(go, 20));
  return /^gnomon_generations_open [1-9]/m.test(told);
};
while (await under_way());
(async () => {
  while (!(await under_way()));
  leaving.abort();
})();
try {
  await client.chat.completions.create(long, { signal: leaving.signal });
} catch (error) {
  report.whole = error.constructor.name;
}
console.log(JSON.stringify(report));
