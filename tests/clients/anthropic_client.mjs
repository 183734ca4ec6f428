// Talks to the server named in the environment and prints what came back, as one JSON object.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const ask = (content) => [{ role: "user", content }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", description: "The weather.", input_schema }];
const report = {};

const whole = await client.messages.create({ model, max_tokens: 9, messages: ask("Hi") });
report.whole = { content: whole.content, reason: whole.stop_reason, requestId: whole._request_id };
const counted = await client.messages.countTokens({ model, messages: ask("Hi") });
report.counted = counted.input_tokens === whole.usage.input_tokens;

const thinking = { type: "enabled", budget_tokens: 1024 };
const stream = client.messages.stream({ model, max_tokens: 2048, messages: ask("Weather?"), tools, thinking });
report.types = [];
for await (const event of stream) report.types.push(event.type);
const answer = await stream.finalMessage();
report.blocks = answer.content.map((block) => block.type);
const calls = answer.content.filter((block) => block.type === "tool_use");
report.calls = calls.map((call) => call.input);
const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "sunny" }));
const messages = [
  ...ask("Weather?"),
  { role: "assistant", content: answer.content },
  { role: "user", content: results },
];
report.final = (await client.messages.create({ model, max_tokens: 9, messages, tools })).content;

const failure = async (work) => {
  try {
    await work();
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, message: error.message };
  }
  return null;
};
report.bad = await failure(() => client.messages.create({ model, max_tokens: 0, messages: ask("Hi") }));
report.midstream = await failure(() => client.messages.stream({ model, max_tokens: 9, messages: ask("fail") }).done());
console.log(JSON.stringify(report));
