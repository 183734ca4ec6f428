// The same questions to whatever model the server in the environment has: streamed as whole, calls that are insisted on, and aborts.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const ask = (content) => [{ role: "user", content }];
const input_schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Zürich"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ name: "weather", description: "The weather.", input_schema }];
const chat = { model, temperature: 0, max_tokens: 24 };
const report = {};

const whole = await client.messages.create({ ...chat, messages: ask("Hi") });
const streamed = await client.messages.stream({ ...chat, messages: ask("Hi") }).finalMessage();
report.chat = {
  said: whole.content[0].text.length > 0,
  same: JSON.stringify(streamed.content) === JSON.stringify(whole.content),
  counted: streamed.usage.output_tokens === whole.usage.output_tokens,
};

const called = (message) => ({
  finish: message.stop_reason,
  calls: message.content.map((block) => [block.type, block.name, block.input]),
});
const tool_choice = { type: "any", disable_parallel_tool_use: true };
const one = { ...chat, messages: ask("Weather?"), tools, tool_choice };
report.any = called(await client.messages.create(one));
report.anyStreamed = called(await client.messages.stream(one).finalMessage());
report.named = called(await client.messages.create({ ...one, tool_choice: { ...tool_choice, type: "tool", name: "weather" } }));

const format = { type: "json_schema", schema: input_schema };
const formed = await client.messages.create({ ...chat, messages: ask("City?"), output_config: { format } });
report.form = Object.keys(JSON.parse(formed.content[0].text));

const long = { ...chat, messages: ask("wait"), max_tokens: 4000, ignore_eos: true };
const stream = client.messages.stream(long);
report.seen = 0;
try {
  for await (const event of stream) {
    if (event.type === "content_block_delta" && ++report.seen === 1) stream.abort();
  }
} catch (error) {
  report.aborted = error.constructor.name;
}
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
  await client.messages.create(long, { signal: leaving.signal });
} catch (error) {
  report.whole = error.constructor.name;
}
console.log(JSON.stringify(report));
