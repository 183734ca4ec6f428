// Talks to the Responses API of the server named in the environment and prints what came back, as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "weather", description: "The weather.", parameters, strict: false }];
const report = {};

const whole = await client.responses.create({ model, input: "Hi" });
report.whole = { text: whole.output_text, status: whole.status, output: whole.usage.output_tokens };

const stream = client.responses.stream({ model, input: "Weather?", tools, reasoning: { effort: "high" } });
report.types = [];
for await (const event of stream) report.types.push(event.type);
const answer = await stream.finalResponse();
const calls = answer.output.filter((item) => item.type === "function_call");
report.calls = calls.map((call) => JSON.parse(call.arguments));
const input = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "sunny" }));
report.final = (await client.responses.create({ model, input, tools, previous_response_id: answer.id })).output_text;

report.items = [];
for await (const item of client.responses.inputItems.list(whole.id)) report.items.push(item.type);
await client.responses.delete(whole.id);
try {
  await client.responses.retrieve(whole.id);
} catch (error) {
  report.gone = error.status;
}
console.log(JSON.stringify(report));
