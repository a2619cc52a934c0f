// /// script
// dependencies = ["ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92"]
// ///
// Vercel's AI SDK, over responses (`@ai-sdk/openai`); its stream over chat completions (`@ai-sdk/openai-compatible`)
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { CALL, CITY, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run } from "./asked.mjs";

const over_responses = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL);
const over_chat = (url) => createOpenAICompatible({ name: "outrider", baseURL: `${url}/v1`, apiKey: KEY })(MODEL);
const asked = (model, prompt, maxOutputTokens) => ({ model, prompt, maxOutputTokens, temperature: 0, maxRetries: 0 });

await run({
  async default(url) {
    return (await generateText(asked(over_responses(url), QUESTION, SHORT))).text;
  },
  async stream(url) {
    const pieces = [];
    for await (const piece of streamText(asked(over_chat(url), QUESTION, SHORT)).textStream) pieces.push(piece);
    return pieces;
  },
  async tools(url) {
    const tools = { weather: tool({ description: "The weather in a city.", inputSchema: jsonSchema(CITY) }) };
    const [call] = (await generateText({ ...asked(over_responses(url), CALL, LONG), tools })).toolCalls;
    return { name: call.toolName, arguments: call.input };
  },
  async structured(url) {
    const output = Output.object({ schema: jsonSchema(COLOUR) });
    return (await generateText({ ...asked(over_responses(url), QUESTION, LONG), output })).output;
  },
});
