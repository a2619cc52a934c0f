// /// script
// dependencies = ["openai@6.49.0"]
// ///
// OpenAI's client for Node, over chat completions and responses
import OpenAI from "openai";
import { CALL, CITY, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run, user } from "./asked.mjs";

const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 });
const asked = (text, max_tokens) => ({ model: MODEL, messages: user(text), temperature: 0, max_tokens });

await run({
  async default(url) {
    const response = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: SHORT };
    const over_responses = (await client(url).responses.create(response)).output_text;
    const over_chat = (await client(url).chat.completions.create(asked(QUESTION, SHORT))).choices[0].message.content;
    if (over_responses !== over_chat) throw new Error(`responses say ${over_responses}`);
    return over_chat;
  },
  async stream(url) {
    const pieces = [];
    for await (const chunk of await client(url).chat.completions.create({ ...asked(QUESTION, SHORT), stream: true })) {
      pieces.push(chunk.choices[0]?.delta.content ?? "");
    }
    return pieces;
  },
  async tools(url) {
    const tools = [{ type: "function", function: { name: "weather", parameters: CITY } }];
    const answer = await client(url).chat.completions.create({ ...asked(CALL, LONG), tools });
    const call = answer.choices[0].message.tool_calls[0].function;
    return { name: call.name, arguments: JSON.parse(call.arguments) };
  },
  async structured(url) {
    const response_format = { type: "json_schema", json_schema: { name: "colour", schema: COLOUR, strict: true } };
    const answer = await client(url).chat.completions.create({ ...asked(QUESTION, LONG), response_format });
    return JSON.parse(answer.choices[0].message.content);
  },
});
