// An agent's turn against the server named in the environment; prints what came back, as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = "any";
const messages = [{ role: "user", content: "What time is it, and how warm?" }];
const seen = [];
const use = (name) => (args) => {
  seen.push([name, JSON.parse(args)]);
  return name === "weather" ? "21 degrees" : "noon";
};
const tool = (name, properties) => ({
  type: "function",
  function: { name, function: use(name), parameters: { type: "object", properties } },
});
const city = { city: { type: "string" }, days: { type: "integer" }, zip: { type: "string" } };
const tools = [tool("weather", city), tool("time", {})];

const whole = await client.chat.completions.runTools({ model, messages, tools }).finalContent();
const streamed = await client.chat.completions.runTools({ model, messages, tools, stream: true }).finalContent();
console.log(JSON.stringify({ whole, streamed, seen }));
