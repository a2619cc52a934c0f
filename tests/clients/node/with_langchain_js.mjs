// /// script
// dependencies = ["@langchain/openai@1.5.8", "@langchain/core@1.4.0"]
// ///
// LangChain's ChatOpenAI for JavaScript, over chat completions
import { ChatOpenAI } from "@langchain/openai";
import { CALL, CITY, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run } from "./asked.mjs";

const chat = (url, maxTokens) =>
  new ChatOpenAI({ model: MODEL, temperature: 0, maxTokens, maxRetries: 0, apiKey: KEY, configuration: { baseURL: `${url}/v1` } });

await run({
  async default(url) {
    return (await chat(url, SHORT).invoke(QUESTION)).content;
  },
  async stream(url) {
    const pieces = [];
    for await (const chunk of await chat(url, SHORT).stream(QUESTION)) pieces.push(chunk.content);
    return pieces;
  },
  async tools(url) {
    const weather = { type: "function", function: { name: "weather", parameters: CITY } };
    const [call] = (await chat(url, LONG).bindTools([weather]).invoke(CALL)).tool_calls;
    return { name: call.name, arguments: call.args };
  },
  async structured(url) {
    return await chat(url, LONG).withStructuredOutput(COLOUR, { name: "colour", method: "jsonSchema" }).invoke(QUESTION);
  },
});
