// /// script
// dependencies = ["promptfoo@0.121.20"]
// [tool.outrider]
// stream = "Its providers ask for whole answers."
// ///
// promptfoo, over chat completions
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { CALL, CITY, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run } from "./asked.mjs";

function evaluated(url, prompt, max_tokens, more = {}) {
  const config = { apiBaseUrl: `${url}/v1`, apiKey: KEY, temperature: 0, max_tokens, ...more };
  const suite = { prompts: ["{{asked}}"], providers: [{ id: `openai:chat:${MODEL}`, config }], tests: [{ vars: { asked: prompt } }] };
  const folder = process.env.CLIENT_FOLDER;
  writeFileSync(`${folder}/suite.json`, JSON.stringify(suite));
  const command = ["promptfoo", "eval", "--no-cache", "--config", `${folder}/suite.json`, "--output", `${folder}/told.json`];
  const env = { ...process.env, PROMPTFOO_CONFIG_DIR: folder, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1" };
  execFileSync("npx", command, { cwd: import.meta.dirname, env, stdio: ["ignore", "ignore", "inherit"] });
  return JSON.parse(readFileSync(`${folder}/told.json`)).results.results[0].response.output;
}

await run({
  default: (url) => evaluated(url, QUESTION, SHORT),
  tools(url) {
    const told = evaluated(url, CALL, LONG, { tools: [{ type: "function", function: { name: "weather", parameters: CITY } }] });
    // Where there is a text beside them, the calls stand in a message.
    const [call] = told.tool_calls ?? told;
    return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
  },
  structured(url) {
    const response_format = { type: "json_schema", json_schema: { name: "colour", schema: COLOUR, strict: true } };
    const told = evaluated(url, QUESTION, LONG, { response_format });
    return typeof told === "string" ? JSON.parse(told) : told;
  },
});
